// The functions of libcuda.so.1 that cuda_driver.cc looks up, but for those in fake_cuda_work.cc.
#include "fake_cuda.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "fake_cuda_call.h"
#include "fake_cuda_memory.h"
#include "fake_cuda_stream.h"

namespace {

using namespace fake_cuda;
using Stream = CUstream_st*;
using Event = CUevent_st*;
using DevicePtr = unsigned long long;

CUctx_st primary;
std::atomic<bool> stream_memory{true};
auto& streams = *new Alive<CUstream_st>;  // Never destroyed: threads use them.
auto& events = *new Alive<CUevent_st>;

uintptr_t Number(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int cuInit(unsigned) {
  SetReady();
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

int cuCtxGetDevice(int* device) {
  if (const int error = Enter("cuCtxGetDevice")) return error;
  *device = 0;
  return kOk;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (const int error = Enter("cuDeviceGetAttribute", false)) return error;
  if (device != 0) return kNoDevice;
  *value = attribute == 122 && stream_memory;  // Memory operations of the newer interface.
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
  return {streams.count(),
          events.count(),
          Live(Kind::kDevice),
          Live(Kind::kPinned),
          Live(Kind::kRegistered),
          LiveModules(),
          Pending()};
}

void fake_cuda_fail_at(int n, int error, bool lasting) { FailAt(n, error, lasting); }
const char* fake_cuda_failed() { return Failed(); }
void fake_cuda_delay_us(int most) { SetDelay(most); }
void fake_cuda_hold(int on) { SetHold(on != 0); }
void fake_cuda_stream_memory(int on) { stream_memory = on != 0; }

}  // extern "C"
#pragma GCC visibility pop
