// Modules and launches of the one kernel that there is (cuda_result.cc).
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "fake_cuda_call.h"
#include "fake_cuda_memory.h"
#include "fake_cuda_stream.h"

struct CUmod_st {
  std::string image;
};
struct CUfunc_st {};

namespace fake_cuda {
namespace {

constexpr int kInvalidPtx = 218, kNotFound = 500;
std::atomic<bool> takes_kernels{true};
auto& modules = *new Alive<CUmod_st>;  // Never destroyed: threads use them.
CUfunc_st carry_result;

// What the kernel is told.
struct Parameters {
  uint64_t from, o, lse;
  uint32_t o_size, size;
};

Parameters Read(void** parameters) {
  const auto number = [&](int i, auto* value) {
    std::memcpy(value, parameters[i], sizeof(*value));
  };
  Parameters read{};
  number(0, &read.from);
  number(1, &read.o);
  number(2, &read.lse);
  number(3, &read.o_size);
  number(4, &read.size);
  return read;
}

}  // namespace

int LiveModules() { return modules.count(); }

}  // namespace fake_cuda

using namespace fake_cuda;

#pragma GCC visibility push(default)
extern "C" {

int cuModuleLoadData(CUmod_st** module, const void* image) {
  if (const int error = Enter("cuModuleLoadData")) return error;
  const std::string text = static_cast<const char*>(image);
  if (!takes_kernels || text.find(".version") == std::string::npos) return kInvalidPtx;
  *module = modules.Make();
  (*module)->image = text;
  return kOk;
}

int cuModuleUnload(CUmod_st* module) {
  const int error = Enter("cuModuleUnload");
  if (!Effective(error)) return error;
  return modules.Destroy(module) ? error : kInvalidHandle;
}

int cuModuleGetFunction(CUfunc_st** function, CUmod_st* module, const char* name) {
  if (const int error = Enter("cuModuleGetFunction")) return error;
  const bool has_it = module->image.find(".entry " + std::string(name) + "(") != std::string::npos;
  *function = has_it ? &carry_result : nullptr;
  return has_it ? kOk : kNotFound;
}

int cuLaunchKernel(CUfunc_st* function, unsigned blocks, unsigned blocks_y, unsigned blocks_z,
                   unsigned threads, unsigned threads_y, unsigned threads_z, unsigned shared,
                   CUstream_st* stream, void** parameters, void** extra) {
  if (const int error = Enter("cuLaunchKernel")) return error;
  if (function != &carry_result || stream == nullptr) return kInvalidHandle;
  if (blocks_y * blocks_z * threads_y * threads_z != 1 || shared != 0 || extra != nullptr ||
      threads > 1024) {
    return kInvalidValue;
  }
  const Parameters read = Read(parameters);
  // A thread without a number would be one that is left out.
  if (uint64_t{blocks} * threads < read.size || read.o_size > read.size) return kInvalidValue;
  const size_t o_bytes = 4 * size_t{read.o_size};
  const size_t lse_bytes = 4 * size_t{read.size} - o_bytes;
  Use from = Find(read.from, o_bytes + lse_bytes, false);
  Use o = Find(read.o, o_bytes, true), lse = Find(read.lse, lse_bytes, true);
  if (!from || !o || !lse) return kInvalidValue;
  stream->line.Push([=, from = std::move(from), o = std::move(o), lse = std::move(lse)] {
    const auto* const begin = reinterpret_cast<const uint8_t*>(read.from);
    std::memcpy(reinterpret_cast<void*>(read.o), begin, o_bytes);
    std::memcpy(reinterpret_cast<void*>(read.lse), begin + o_bytes, lse_bytes);
  });
  return kOk;
}

void fake_cuda_kernels(int on) { takes_kernels = on != 0; }

}  // extern "C"
#pragma GCC visibility pop
