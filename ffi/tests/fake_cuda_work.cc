// The functions that give a stream something to do with memory or with a callback.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>

#include "fake_cuda_call.h"
#include "fake_cuda_memory.h"
#include "fake_cuda_stream.h"

namespace {

using namespace fake_cuda;
using Stream = CUstream_st*;
using DevicePtr = unsigned long long;

uintptr_t Number(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// A copy; both ranges stay in use until it is done.
int Copy(uintptr_t to, bool to_device, uintptr_t from, bool from_device, size_t bytes,
         Stream stream) {
  if (stream == nullptr) return kInvalidHandle;
  if (bytes == 0) return kOk;
  Use target = Find(to, bytes, to_device);
  Use source = Find(from, bytes, from_device);
  if (!target || !source) return kInvalidValue;
  stream->line.Push([=, target = std::move(target), source = std::move(source)] {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  });
  return kOk;
}

// A number of 32 bits in pinned or device memory.
Use FindNumber(DevicePtr address) {
  if (address % sizeof(uint32_t) != 0) return nullptr;
  Use found = Find(address, sizeof(uint32_t), false);
  return found ? found : Find(address, sizeof(uint32_t), true);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int cuMemcpyHtoDAsync_v2(DevicePtr to, const void* from, size_t bytes, Stream stream) {
  if (const int error = Enter("cuMemcpyHtoDAsync")) return error;
  return Copy(to, true, Number(from), false, bytes, stream);
}

int cuMemcpyDtoHAsync_v2(void* to, DevicePtr from, size_t bytes, Stream stream) {
  if (const int error = Enter("cuMemcpyDtoHAsync")) return error;
  return Copy(Number(to), false, from, true, bytes, stream);
}

int cuMemcpyDtoDAsync_v2(DevicePtr to, DevicePtr from, size_t bytes, Stream stream) {
  if (const int error = Enter("cuMemcpyDtoDAsync")) return error;
  return Copy(to, true, from, true, bytes, stream);
}

int cuMemsetD32Async(DevicePtr to, unsigned value, size_t count, Stream stream) {
  if (const int error = Enter("cuMemsetD32Async")) return error;
  Use target = Find(to, count * sizeof(value), true);
  if (!target) return kInvalidValue;
  stream->line.Push([=, target = std::move(target)] {
    std::fill_n(reinterpret_cast<unsigned*>(to), count, value);
  });
  return kOk;
}

int cuLaunchHostFunc(Stream stream, void (*function)(void*), void* data) {
  if (const int error = Enter("cuLaunchHostFunc")) return error;
  stream->line.Push([=] { RunCallback(function, data); });
  return kOk;
}

int cuStreamWriteValue32_v2(Stream stream, DevicePtr address, uint32_t value, unsigned flags) {
  if (const int error = Enter("cuStreamWriteValue32")) return error;
  if (stream == nullptr) return kInvalidHandle;
  Use number = FindNumber(address);
  if (!number || flags != 0) return kInvalidValue;
  stream->line.Push([=, number = std::move(number)] {
    __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE);
  });
  return kOk;
}

int cuStreamWaitValue32_v2(Stream stream, DevicePtr address, uint32_t value, unsigned flags) {
  if (const int error = Enter("cuStreamWaitValue32")) return error;
  if (stream == nullptr) return kInvalidHandle;
  Use number = FindNumber(address);
  if (!number || flags != 0) return kInvalidValue;
  stream->line.Push([=, number = std::move(number)] {
    const auto* const at = reinterpret_cast<const uint32_t*>(address);
    // At least, on a circle of numbers.
    while (static_cast<int32_t>(__atomic_load_n(at, __ATOMIC_ACQUIRE) - value) < 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  return kOk;
}

}  // extern "C"
#pragma GCC visibility pop
