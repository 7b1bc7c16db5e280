#include "cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

namespace wscope::cuda {
namespace {

constexpr Result kOutOfMemory = 2;
constexpr unsigned kNonBlocking = 1;     // A stream that does not wait for the default stream.
constexpr unsigned kPortableMapped = 3;  // Pinned for all contexts, with an address on the device.

struct Loaded {
  std::unique_ptr<Driver> driver;
  std::string why;
};

template <typename Function>
bool Find(void* library, const char* name, Function* function, std::string* missing) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && missing->empty()) *missing = name;
  return *function != nullptr;
}

std::string FindAll(void* library, Driver* d) {
  std::string missing;
  Find(library, "cuInit", &d->Init, &missing);
  Find(library, "cuDeviceGet", &d->DeviceGet, &missing);
  Find(library, "cuDevicePrimaryCtxRetain", &d->DevicePrimaryCtxRetain, &missing);
  Find(library, "cuCtxGetCurrent", &d->CtxGetCurrent, &missing);
  Find(library, "cuCtxSetCurrent", &d->CtxSetCurrent, &missing);
  Find(library, "cuStreamCreate", &d->StreamCreate, &missing);
  Find(library, "cuStreamDestroy_v2", &d->StreamDestroy, &missing);
  Find(library, "cuStreamQuery", &d->StreamQuery, &missing);
  Find(library, "cuStreamSynchronize", &d->StreamSynchronize, &missing);
  Find(library, "cuStreamWaitEvent", &d->StreamWaitEvent, &missing);
  Find(library, "cuEventCreate", &d->EventCreate, &missing);
  Find(library, "cuEventDestroy_v2", &d->EventDestroy, &missing);
  Find(library, "cuEventRecord", &d->EventRecord, &missing);
  Find(library, "cuEventQuery", &d->EventQuery, &missing);
  Find(library, "cuEventElapsedTime", &d->EventElapsedTime, &missing);
  Find(library, "cuMemAlloc_v2", &d->MemAlloc, &missing);
  Find(library, "cuMemFree_v2", &d->MemFree, &missing);
  Find(library, "cuMemHostAlloc", &d->MemHostAlloc, &missing);
  Find(library, "cuMemFreeHost", &d->MemFreeHost, &missing);
  Find(library, "cuMemHostRegister_v2", &d->MemHostRegister, &missing);
  Find(library, "cuMemHostUnregister", &d->MemHostUnregister, &missing);
  Find(library, "cuMemcpyHtoDAsync_v2", &d->MemcpyHtoDAsync, &missing);
  Find(library, "cuMemcpyDtoHAsync_v2", &d->MemcpyDtoHAsync, &missing);
  Find(library, "cuMemcpyDtoDAsync_v2", &d->MemcpyDtoDAsync, &missing);
  Find(library, "cuMemsetD32Async", &d->MemsetD32Async, &missing);
  Find(library, "cuLaunchHostFunc", &d->LaunchHostFunc, &missing);
  Find(library, "cuGetErrorString", &d->GetErrorString, &missing);
  std::string unneeded;
  Find(library, "cuCtxGetDevice", &d->CtxGetDevice, &unneeded);
  Find(library, "cuDeviceGetAttribute", &d->DeviceGetAttribute, &unneeded);
  Find(library, "cuStreamWriteValue32_v2", &d->StreamWriteValue32, &unneeded);
  Find(library, "cuStreamWaitValue32_v2", &d->StreamWaitValue32, &unneeded);
  Find(library, "cuModuleLoadData", &d->ModuleLoadData, &unneeded);
  Find(library, "cuModuleUnload", &d->ModuleUnload, &unneeded);
  Find(library, "cuModuleGetFunction", &d->ModuleGetFunction, &unneeded);
  Find(library, "cuLaunchKernel", &d->LaunchKernel, &unneeded);
  return missing;
}

Loaded Load() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // Stays open.
  if (library == nullptr) return {nullptr, "there is no NVIDIA driver (libcuda.so.1)"};
  auto driver = std::make_unique<Driver>();
  const std::string missing = FindAll(library, driver.get());
  if (!missing.empty()) return {nullptr, "the NVIDIA driver is too old: it has no " + missing};
  return {std::move(driver), {}};
}

const Loaded& TheDriver() {
  static const auto* const loaded = new Loaded(Load());  // Never destroyed: threads use it.
  return *loaded;
}

// The driver of an object that exists only where there is one.
const Driver& Cu() { return *TheDriver().driver; }

}  // namespace

const Driver* GetDriver() { return TheDriver().driver.get(); }
const std::string& WhyNoDriver() { return TheDriver().why; }

Status Check(Result result, const char* call) {
  if (result == 0) return Status::Ok();
  const char* words = nullptr;
  Cu().GetErrorString(result, &words);
  std::string text = std::string(call) + ": the NVIDIA driver says: " +
                     (words ? words : "error " + std::to_string(result));
  if (result == kOutOfMemory) return Status::ResourceExhausted(std::move(text));
  return Status::Internal(std::move(text));
}

Context Current() {
  Context context = nullptr;
  return Cu().CtxGetCurrent(&context) == 0 ? context : nullptr;
}

Event::~Event() {
  if (!handle_) return;
  const Scope scope(context_);
  Cu().EventDestroy(handle_);
}

Status Event::Record(Stream stream) {
  if (!handle_) {
    context_ = Current();
    if (Status made = Check(Cu().EventCreate(&handle_, 0), "event"); !made.ok()) return made;
  }
  return Check(Cu().EventRecord(handle_, stream), "event");
}

Status Event::MakeWait(Stream stream) const {
  if (!handle_) return Status::Ok();
  return Check(Cu().StreamWaitEvent(stream, handle_, 0), "stream");
}

Result Event::Query() const { return handle_ ? Cu().EventQuery(handle_) : 0; }

int64_t Event::Since(const Event& earlier) const {
  const Scope scope(context_);
  float ms = 0.0f;
  if (!handle_ || !earlier.handle_ || Cu().EventElapsedTime(&ms, earlier.handle_, handle_) != 0) {
    return 0;
  }
  return std::max<int64_t>(0, std::llround(double{ms} * 1e6));
}

std::shared_ptr<Event> EventPool::Take() {
  auto event = std::make_unique<Event>();
  {
    const std::lock_guard<std::mutex> lock(spare_->mutex);
    if (!spare_->events.empty()) {
      *event = std::move(spare_->events.back());
      spare_->events.pop_back();
    }
  }
  return {event.release(), [spare = spare_](Event* used) {
            const std::unique_ptr<Event> owned(used);
            const std::lock_guard<std::mutex> lock(spare->mutex);
            spare->events.push_back(std::move(*owned));
          }};
}

Status PinnedBuffer::Make(int64_t bytes, std::shared_ptr<PinnedBuffer>* buffer) {
  void* data = nullptr;
  Status status = Check(Cu().MemHostAlloc(&data, bytes, kPortableMapped), "pinned buffer");
  if (status.ok()) buffer->reset(new PinnedBuffer(data, bytes));
  return status;
}

PinnedBuffer::~PinnedBuffer() {
  const Scope scope(context_);
  Cu().MemFreeHost(data_);
}

Status DeviceBuffer::Make(int64_t bytes, std::shared_ptr<DeviceBuffer>* buffer) {
  DevicePtr data = 0;
  Status status = Check(Cu().MemAlloc(&data, bytes), "device buffer");
  if (status.ok()) buffer->reset(new DeviceBuffer(data, bytes));
  return status;
}

DeviceBuffer::~DeviceBuffer() {
  const Scope scope(context_);
  Cu().MemFree(data_);
}

OwnStream::~OwnStream() {
  if (!stream_) return;
  const Scope scope(context_);
  Cu().StreamDestroy(stream_);
}

Status OwnStream::Make() {
  context_ = Current();
  return Check(Cu().StreamCreate(&stream_, kNonBlocking), "stream");
}

Result OwnStream::Query() const { return stream_ ? Cu().StreamQuery(stream_) : 0; }

Scope::Scope(Context context) {
  if (!context) return;
  // Without knowing it we could not bring back what the thread's owner, XLA, relies on.
  status_ = Check(Cu().CtxGetCurrent(&before_), "context");
  if (!status_.ok() || before_ == context) return;
  status_ = Check(Cu().CtxSetCurrent(context), "context");
  changed_ = status_.ok();
}

Scope::~Scope() {
  if (changed_) Cu().CtxSetCurrent(before_);
}

namespace {

class DriverPageLock : public PageLock {
 public:
  explicit DriverPageLock(Context context) : context_(context) {}

  std::string Lock(void* begin, size_t bytes) override {
    const Scope scope(context_);
    if (!scope.status().ok()) return scope.status().text;
    return Check(Cu().MemHostRegister(begin, bytes, kPortableMapped), "pinning").text;
  }
  void Unlock(void* begin) override {
    const Scope scope(context_);
    Cu().MemHostUnregister(begin);
  }

 private:
  const Context context_;
};

}  // namespace

Context PrimaryContext(int device) {
  if (!GetDriver()) throw std::runtime_error("CUDA: " + WhyNoDriver());
  int handle = 0;
  Context context = nullptr;
  Status status = Check(Cu().Init(0), "driver");
  if (status.ok()) status = Check(Cu().DeviceGet(&handle, device), "device");
  if (status.ok()) status = Check(Cu().DevicePrimaryCtxRetain(&context, handle), "context");
  if (!status.ok()) throw std::runtime_error("CUDA: " + status.text);
  return context;
}

std::shared_ptr<PageLock> MakePageLock(int device) {
  return std::make_shared<DriverPageLock>(PrimaryContext(device));
}

int64_t TimeLoad(int device, int64_t bytes) {
  constexpr int kRuns = 5;
  const Scope scope(PrimaryContext(device));
  std::shared_ptr<PinnedBuffer> from;
  std::shared_ptr<DeviceBuffer> to;
  OwnStream stream;
  std::array<Event, kRuns + 1> events;
  Status status = First({scope.status(), PinnedBuffer::Make(bytes, &from),
                         DeviceBuffer::Make(bytes, &to), stream.Make()});
  if (status.ok()) status = events[0].Record(stream.get());
  for (int run = 1; status.ok() && run <= kRuns; ++run) {
    status = Check(Cu().MemcpyHtoDAsync(to->data(), from->data(), bytes, stream.get()), "copy");
    if (status.ok()) status = events[run].Record(stream.get());
  }
  // After a failure too: copies may be under way from and to what is freed here.
  if (stream.get()) status = First({status, Check(Cu().StreamSynchronize(stream.get()), "copy")});
  if (!status.ok()) throw std::runtime_error("CUDA: " + status.text);
  std::array<int64_t, kRuns> took;
  for (int run = 0; run < kRuns; ++run) took[run] = events[run + 1].Since(events[run]);
  std::sort(took.begin(), took.end());
  return took[kRuns / 2];
}

}  // namespace wscope::cuda
