#include "fake_cuda_call.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "fake_cuda_stream.h"

namespace fake_cuda {
namespace {

const pid_t process = getpid();
std::atomic<bool> ready{false};
std::atomic<int> calls_left{0};  // Until one fails.
std::atomic<int> error_then{0};
std::atomic<bool> lasts{false};
std::atomic<const char*> failed{nullptr};

}  // namespace

thread_local CUctx_st* current = nullptr;

int Enter(const char* name, bool in_context) {
  if (InCallback()) {
    std::fprintf(stderr, "fake_cuda: %s is called by a callback\n", name);
    std::abort();
  }
  if (!ready.load(std::memory_order_relaxed) || getpid() != process) return kNotInitialized;
  if (in_context && current == nullptr) return kInvalidContext;
  if (calls_left.load(std::memory_order_relaxed) > 0 &&
      calls_left.fetch_sub(1, std::memory_order_relaxed) == 1) {
    failed = name;
    return error_then;
  }
  if (lasts && failed != nullptr) return error_then;
  return kOk;
}

bool Effective(int error) { return error != kInvalidContext && error != kNotInitialized; }

void SetReady() { ready = true; }

void FailAt(int n, int error, bool lasting) {
  failed = nullptr;
  error_then = error;
  lasts = lasting;
  calls_left = n;
}

const char* Failed() { return failed; }

}  // namespace fake_cuda
