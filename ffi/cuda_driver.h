// The CUDA driver's library, opened at run time: one binary for machines with and without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "pool.h"
#include "status.h"

namespace wscope::cuda {

using Context = struct CUctx_st*;
using Stream = struct CUstream_st*;
using EventHandle = struct CUevent_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;
using DevicePtr = unsigned long long;
using Result = int;  // 0 = success

// The functions that we call, under the names of the driver's interface.
struct Driver {
  Result (*Init)(unsigned);
  Result (*DeviceGet)(int*, int);
  Result (*DevicePrimaryCtxRetain)(Context*, int);
  Result (*CtxGetCurrent)(Context*);
  Result (*CtxSetCurrent)(Context);
  Result (*StreamCreate)(Stream*, unsigned);
  Result (*StreamDestroy)(Stream);
  Result (*StreamQuery)(Stream);
  Result (*StreamSynchronize)(Stream);
  Result (*StreamWaitEvent)(Stream, EventHandle, unsigned);
  Result (*EventCreate)(EventHandle*, unsigned);
  Result (*EventDestroy)(EventHandle);
  Result (*EventRecord)(EventHandle, Stream);
  Result (*EventQuery)(EventHandle);
  Result (*EventElapsedTime)(float*, EventHandle, EventHandle);
  Result (*MemAlloc)(DevicePtr*, size_t);
  Result (*MemFree)(DevicePtr);
  Result (*MemHostAlloc)(void**, size_t, unsigned);
  Result (*MemFreeHost)(void*);
  Result (*MemHostRegister)(void*, size_t, unsigned);
  Result (*MemHostUnregister)(void*);
  Result (*MemcpyHtoDAsync)(DevicePtr, const void*, size_t, Stream);
  Result (*MemcpyDtoHAsync)(void*, DevicePtr, size_t, Stream);
  Result (*MemcpyDtoDAsync)(DevicePtr, DevicePtr, size_t, Stream);
  Result (*MemsetD32Async)(DevicePtr, unsigned, size_t, Stream);
  Result (*LaunchHostFunc)(Stream, void (*)(void*), void*);
  Result (*GetErrorString)(Result, const char**);

  // Null in an old driver: nothing that cannot be done without.
  Result (*CtxGetDevice)(int*);
  Result (*DeviceGetAttribute)(int*, int, int);
  Result (*StreamWriteValue32)(Stream, DevicePtr, uint32_t, unsigned);
  Result (*StreamWaitValue32)(Stream, DevicePtr, uint32_t, unsigned);
  Result (*ModuleLoadData)(Module*, const void*);
  Result (*ModuleUnload)(Module);
  Result (*ModuleGetFunction)(Function*, Module, const char*);
  Result (*LaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         unsigned, Stream, void**, void**);
};

// Null where there is no driver, or one that is too old; see WhyNoDriver.
const Driver* GetDriver();
// Empty if there is a driver.
const std::string& WhyNoDriver();

// `call` names what was tried. Out of memory is ResourceExhausted, all else Internal.
Status Check(Result result, const char* call);

constexpr Result kNotReady = 600;  // What a query of work that goes on says.

// The context of this thread; null if there is none.
Context Current();

inline DevicePtr Address(const void* device) { return reinterpret_cast<uintptr_t>(device); }

// What follows belongs to the context that was current when it was made, and goes there on whatever
// thread it dies.

// An event that can tell times. Empty until Record.
class Event {
 public:
  Event() = default;
  ~Event();
  Event(Event&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)), context_(other.context_) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(context_, other.context_);
    return *this;
  }

  Status Record(Stream stream);
  // The stream goes on when the work recorded has ended; no wait for an empty event.
  Status MakeWait(Stream stream) const;
  Result Query() const;  // 0 for an empty event.
  bool Done() const { return Query() == 0; }
  // Nanoseconds from `earlier` to this; both done.
  int64_t Since(const Event& earlier) const;

 private:
  EventHandle handle_ = nullptr;
  Context context_ = nullptr;
};

// Events that are used again: to make one costs more than to record it.
class EventPool {
 public:
  // Goes back to the pool when it dies, on whatever thread, without a call of the driver. What was
  // recorded before may still be in it.
  std::shared_ptr<Event> Take();

 private:
  struct Spare {
    std::mutex mutex;
    std::vector<Event> events;
  };
  const std::shared_ptr<Spare> spare_ = std::make_shared<Spare>();
};

// Memory that the device can copy from and to at full speed, under the host's address.
class PinnedBuffer {
 public:
  static Status Make(int64_t bytes, std::shared_ptr<PinnedBuffer>* buffer);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  int64_t size() const { return size_; }

 private:
  PinnedBuffer(void* data, int64_t size) : data_(data), size_(size) {}
  void* const data_;
  const int64_t size_;
  const Context context_ = Current();
};

class DeviceBuffer {
 public:
  static Status Make(int64_t bytes, std::shared_ptr<DeviceBuffer>* buffer);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  DevicePtr data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  DeviceBuffer(DevicePtr data, int64_t size) : data_(data), size_(size) {}
  const DevicePtr data_;
  const int64_t size_;
  const Context context_ = Current();
};

// A stream of our own.
class OwnStream {
 public:
  OwnStream() = default;
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  Status Make();
  Stream get() const { return stream_; }
  Result Query() const;  // 0 when all is done.

 private:
  Stream stream_ = nullptr;
  Context context_ = nullptr;
};

// Makes a context current on this thread, and what was current before when it ends; null changes
// nothing.
class Scope {
 public:
  explicit Scope(Context context);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  const Status& status() const { return status_; }

 private:
  Context before_ = nullptr;
  bool changed_ = false;
  Status status_;
};

// The primary context of a device, which is JAX's own. Throws std::runtime_error without a driver
// or such a device.
Context PrimaryContext(int device);

// Nanoseconds that a copy of so many bytes from pinned memory to a device takes, the median of a
// few. Throws std::runtime_error without a driver, such a device, or room.
int64_t TimeLoad(int device, int64_t bytes);

// Pins a pool's pages in the primary context of a device, for all contexts. Throws
// std::runtime_error without a driver or such a device.
std::shared_ptr<PageLock> MakePageLock(int device);

}  // namespace wscope::cuda
