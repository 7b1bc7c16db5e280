// The functions of libcuda.so.1 that cuda_driver.cc looks up.
#include "fake_cuda.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "fake_cuda_memory.h"
#include "fake_cuda_stream.h"

struct CUctx_st {};

namespace {

using namespace fake_cuda;
using Stream = CUstream_st*;
using Event = CUevent_st*;
using DevicePtr = unsigned long long;

enum Error {
  kOk = 0,
  kInvalidValue = 1,
  kNotInitialized = 3,
  kNoDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotReady = 600,
  kNotRegistered = 713,
};

CUctx_st primary;
thread_local CUctx_st* current = nullptr;
const pid_t process = getpid();
std::atomic<bool> ready{false};
std::atomic<int> calls_left{0};  // Until one fails.
std::atomic<int> error_then{0};
std::atomic<bool> lasts{false};
std::atomic<const char*> failed{nullptr};
auto& streams = *new Alive<CUstream_st>;  // Never destroyed: threads use them.
auto& events = *new Alive<CUevent_st>;

// What every call begins with.
int Enter(const char* name, bool in_context = true) {
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

uintptr_t Number(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int cuInit(unsigned) {
  ready = true;
  return Enter("cuInit", false);
}

int cuDeviceGet(int* device, int ordinal) {
  if (const int error = Enter("cuDeviceGet", false)) return error;
  *device = ordinal;
  return ordinal == 0 ? kOk : kNoDevice;
}

int cuDevicePrimaryCtxRetain(CUctx_st** context, int) {
  if (const int error = Enter("cuDevicePrimaryCtxRetain", false)) return error;
  *context = &primary;
  return kOk;
}

int cuCtxGetCurrent(CUctx_st** context) {
  if (const int error = Enter("cuCtxGetCurrent", false)) return error;
  *context = current;
  return kOk;
}

int cuCtxSetCurrent(CUctx_st* context) {
  if (const int error = Enter("cuCtxSetCurrent", false)) return error;
  current = context;
  return kOk;
}

int cuStreamCreate(Stream* stream, unsigned) {
  if (const int error = Enter("cuStreamCreate")) return error;
  *stream = streams.Make();
  return kOk;
}

int cuStreamDestroy_v2(Stream stream) {
  const int error = Enter("cuStreamDestroy");
  if (!Effective(error)) return error;
  return streams.Destroy(stream) ? error : kInvalidHandle;
}

int cuStreamQuery(Stream stream) {
  if (const int error = Enter("cuStreamQuery", false)) return error;
  return stream->line.Idle() ? kOk : kNotReady;
}

int cuStreamSynchronize(Stream stream) {
  const int error = Enter("cuStreamSynchronize", false);
  if (!Effective(error)) return error;
  const auto end = std::make_shared<Point>();
  stream->line.Push([end] { end->Reach(); });
  end->Wait();
  return error;
}

int cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  if (const int error = Enter("cuStreamWaitEvent", false)) return error;
  std::shared_ptr<Point> point = event->Get();
  if (point) stream->line.Push([point = std::move(point)] { point->Wait(); });
  return kOk;
}

int cuEventCreate(Event* event, unsigned) {
  if (const int error = Enter("cuEventCreate")) return error;
  *event = events.Make();
  return kOk;
}

int cuEventDestroy_v2(Event event) {
  const int error = Enter("cuEventDestroy");
  if (!Effective(error)) return error;
  return events.Destroy(event) ? error : kInvalidHandle;
}

int cuEventRecord(Event event, Stream stream) {
  if (const int error = Enter("cuEventRecord")) return error;
  if (event == nullptr || stream == nullptr) return kInvalidHandle;
  const auto point = std::make_shared<Point>();
  event->Set(point);
  stream->line.Push([point] { point->Reach(); });
  return kOk;
}

int cuEventQuery(Event event) {
  if (const int error = Enter("cuEventQuery", false)) return error;
  const std::shared_ptr<Point> point = event->Get();
  return !point || point->reached() ? kOk : kNotReady;
}

int cuEventElapsedTime(float* ms, Event begin, Event end) {
  if (const int error = Enter("cuEventElapsedTime")) return error;
  const std::shared_ptr<Point> first = begin->Get();
  const std::shared_ptr<Point> last = end->Get();
  if (!first || !last) return kInvalidHandle;
  if (!first->reached() || !last->reached()) return kNotReady;
  *ms = std::chrono::duration<float, std::milli>(last->when() - first->when()).count();
  return kOk;
}

int cuMemAlloc_v2(DevicePtr* data, size_t bytes) {
  if (const int error = Enter("cuMemAlloc")) return error;
  if (bytes == 0) return kInvalidValue;
  *data = Number(Allocate(Kind::kDevice, bytes));
  return kOk;
}

int cuMemFree_v2(DevicePtr data) {
  const int error = Enter("cuMemFree");
  if (!Effective(error)) return error;
  return Free(Kind::kDevice, data) ? error : kInvalidValue;
}

int cuMemHostAlloc(void** data, size_t bytes, unsigned) {
  if (const int error = Enter("cuMemHostAlloc")) return error;
  if (bytes == 0) return kInvalidValue;
  *data = Allocate(Kind::kPinned, bytes);
  return kOk;
}

int cuMemFreeHost(void* data) {
  const int error = Enter("cuMemFreeHost");
  if (!Effective(error)) return error;
  return Free(Kind::kPinned, Number(data)) ? error : kInvalidValue;
}

int cuMemHostRegister_v2(void* begin, size_t bytes, unsigned) {
  if (const int error = Enter("cuMemHostRegister")) return error;
  return Register(begin, bytes);
}

int cuMemHostUnregister(void* begin) {
  const int error = Enter("cuMemHostUnregister");
  if (!Effective(error)) return error;
  return Free(Kind::kRegistered, Number(begin)) ? error : kNotRegistered;
}

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

int cuGetErrorString(int error, const char** words) {
  static constexpr std::pair<int, const char*> kWords[] = {
      {kInvalidValue, "invalid argument"},
      {2, "out of memory"},
      {kNotInitialized, "not initialized"},
      {kNoDevice, "invalid device ordinal"},
      {kInvalidContext, "invalid context"},
      {kInvalidHandle, "invalid handle"},
      {kNotReady, "not ready"},
      {712, "already registered"},
      {kNotRegistered, "not registered"},
  };
  for (const auto& [number, text] : kWords) {
    if (number == error) *words = text;
  }
  return kOk;  // Other errors have no words here.
}

FakeCudaLive fake_cuda_live() {
  return {streams.count(),     events.count(),          Live(Kind::kDevice),
          Live(Kind::kPinned), Live(Kind::kRegistered), Pending()};
}

void fake_cuda_fail_at(int n, int error, bool lasting) {
  failed = nullptr;
  error_then = error;
  lasts = lasting;
  calls_left = n;
}

const char* fake_cuda_failed() { return failed; }
void fake_cuda_delay_us(int most) { SetDelay(most); }
void fake_cuda_hold(int on) { SetHold(on != 0); }

}  // extern "C"
#pragma GCC visibility pop
