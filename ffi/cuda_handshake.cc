#include "cuda_handshake.h"

#include <utility>
#include <vector>

#include "clock.h"
#include "cuda_patience.h"

namespace wscope {
namespace {

using Lock = std::unique_lock<std::mutex>;
using Jobs = std::deque<std::shared_ptr<CudaJob>>;
using cuda::Address;
using cuda::Check;

constexpr unsigned kWaitAtLeast = 0;  // Goes on when the memory's number is that large.
constexpr unsigned kWriteFenced = 0;  // What the stream did before is visible before the number.

const cuda::Driver& Cu() { return *cuda::GetDriver(); }

// Two callbacks a job on a stream of its own: they cost ten times what memory operations do, and
// work everywhere. Nothing waits for a flag, so nothing can hang for want of one.
class Callbacks : public Handshake {
 public:
  explicit Callbacks(const std::string& why) : Handshake("host callbacks (" + why + ")") {}

  Status MakeStream() { return stream_.Make(); }

  Status Begin(const std::shared_ptr<CudaJob>& job, cuda::Stream stream) override {
    job->called = events_.Take();
    Status status = job->started->Record(stream);
    if (status.ok()) status = job->started->MakeWait(stream_.get());
    return status.ok() ? Call(&Submit, job) : status;
  }

  Status Await(const std::shared_ptr<CudaJob>& job, cuda::Stream stream) override {
    Status status = Call(&Collect, job);
    return status.ok() ? job->called->MakeWait(stream) : status;
  }

  void Release(int64_t) override {}  // The callbacks come, and there is no flag.

  bool Drain(int64_t deadline_ns) override {
    if (!Patience(deadline_ns).Await([&] { return stream_.Query(); })) return false;
    Jobs jobs;  // Die without the lock.
    {
      const Lock lock(mutex_);
      jobs.swap(jobs_);
    }
    for (; !jobs.empty(); jobs.pop_front()) {
      if (jobs.front()->calls_due > 0) {
        KeepForever(jobs.front());  // The device is lost; its callbacks may still come.
      } else if (!jobs.front()->task->WaitUntil(deadline_ns)) {
        const Lock lock(mutex_);
        jobs_.insert(jobs_.begin(), jobs.begin(), jobs.end());
        return false;
      }
    }
    return true;
  }

 private:
  // What the driver calls, and what may not call it.
  static void Submit(void* data) {
    auto* const held = static_cast<CudaJob*>(data);
    if (!Workers::Get().Submit(held->task)) held->task->RunHere();  // The process is ending.
    --held->calls_due;
  }
  static void Collect(void* data) {
    auto* const held = static_cast<CudaJob*>(data);
    held->task->Wait();
    --held->calls_due;
  }

  // Behind what the stream has got so far.
  Status Call(void (*function)(void*), const std::shared_ptr<CudaJob>& job) {
    const Lock lock(mutex_);
    while (!jobs_.empty() && jobs_.front()->task->done() && jobs_.front()->calls_due == 0) {
      jobs_.pop_front();
    }
    jobs_.push_back(job);
    ++job->calls_due;
    Status status = Check(Cu().LaunchHostFunc(stream_.get(), function, job.get()), "host callback");
    if (!status.ok()) {
      --job->calls_due;
      jobs_.pop_back();
      return status;
    }
    return job->called->Record(stream_.get());
  }

  cuda::OwnStream stream_;
  cuda::EventPool events_;
};

// The stream itself writes a flag that a worker looks at, and waits for the flag that the last
// worker writes.
class StreamFlags : public Handshake {
 public:
  StreamFlags() : Handshake("stream memory operations") {}

  Status Begin(const std::shared_ptr<CudaJob>& job, cuda::Stream stream) override {
    const Lock lock(mutex_);
    while (!jobs_.empty() && jobs_.front()->task->done() && jobs_.front()->started->Done()) {
      jobs_.pop_front();
    }
    jobs_.push_back(job);
    Status status =
        Check(Cu().StreamWriteValue32(stream, Address(job->ready()), 1, kWriteFenced), "flag");
    if (status.ok()) status = job->started->Record(stream);
    // Armed after the write: where that fails nobody would ever raise the flag.
    if (status.ok() && !Workers::Get().Arm(job->task, job->ready())) {
      status = Status::FailedPrecondition("host_start: there are no workers; call start_workers");
    }
    if (!status.ok()) jobs_.pop_back();
    return status;
  }

  Status Await(const std::shared_ptr<CudaJob>& job, cuda::Stream stream) override {
    return Check(Cu().StreamWaitValue32(stream, Address(job->done()), 1, kWaitAtLeast), "flag");
  }

  void Release(int64_t first_step) override {
    Jobs jobs;
    {
      const Lock lock(mutex_);
      jobs = jobs_;
    }
    for (const auto& job : jobs) {
      if (job->step >= first_step) Workers::Get().Disarm(job->task);
    }
  }

  bool Drain(int64_t deadline_ns) override {
    Release(0);
    Jobs jobs;  // Die without the lock.
    {
      const Lock lock(mutex_);
      jobs.swap(jobs_);
    }
    Patience patience(deadline_ns);
    for (; !jobs.empty(); jobs.pop_front()) {
      const CudaJob& job = *jobs.front();
      // The device writes q and the flag even if the job is released.
      const auto has_started = [&] { return job.started->Query(); };
      if (job.task->WaitUntil(deadline_ns) && patience.Await(has_started)) continue;
      const Lock lock(mutex_);
      jobs_.insert(jobs_.begin(), jobs.begin(), jobs.end());
      return false;
    }
    return true;
  }
};

// Empty if streams of the device whose context is current can write and wait for memory.
std::string WhyNoFlags() {
  // 32-bit operations have no attribute of their own since CUDA 12, where every device has them;
  // one of these tells of the older interface, the other of 64 bits in the newer.
  constexpr int kStreamMemoryV1 = 92, kStreamMemory64 = 122;
  const cuda::Driver& driver = Cu();
  if (!driver.StreamWriteValue32 || !driver.StreamWaitValue32 || !driver.CtxGetDevice ||
      !driver.DeviceGetAttribute) {
    return "the NVIDIA driver is too old for stream memory operations";
  }
  int device = 0;
  if (const cuda::Result result = driver.CtxGetDevice(&device)) {
    return Check(result, "device").text;
  }
  for (const int attribute : {kStreamMemory64, kStreamMemoryV1}) {
    int has = 0;
    if (driver.DeviceGetAttribute(&has, attribute, device) == 0 && has != 0) return {};
  }
  return "the device has no stream memory operations";
}

}  // namespace

Status Handshake::Make(std::shared_ptr<Handshake>* handshake) {
  const std::string why = WhyNoFlags();
  if (why.empty()) {
    *handshake = std::make_shared<StreamFlags>();
    return Status::Ok();
  }
  auto callbacks = std::make_shared<Callbacks>(why);
  Status status = callbacks->MakeStream();
  if (status.ok()) *handshake = std::move(callbacks);
  return status;
}

}  // namespace wscope
