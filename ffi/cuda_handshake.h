// How the turn passes from XLA's stream to the workers and back.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "cuda_driver.h"
#include "host_job.h"
#include "status.h"
#include "workers.h"

namespace wscope {

// A host job whose q comes from a device and whose result goes there.
struct CudaJob {
  std::shared_ptr<HostJob> job;
  std::shared_ptr<Task> task;
  int64_t step = 0;                             // The number of its step.
  std::shared_ptr<cuda::PinnedBuffer> staging;  // Flags | o | lse | q; null: no block.
  // q has left XLA's buffer. Shared with the timing, which shall not keep the job.
  std::shared_ptr<cuda::Event> started;
  std::shared_ptr<const void> carrier;  // What brings the result: nothing of it may go before.
  std::shared_ptr<cuda::Event> called;  // The last callback has returned.
  std::atomic<int> calls_due{0};        // Callbacks that have not returned.

  // 1 once q is in staging, and once the result is; on a line of memory each.
  Flag* ready() const { return reinterpret_cast<Flag*>(staging->data()); }
  Flag* done() const { return reinterpret_cast<Flag*>(staging->data() + kFlagBytes / 2); }
  float* o() const { return reinterpret_cast<float*>(staging->data() + kFlagBytes); }
  float* lse() const { return o() + job->o_size(); }
  uint8_t* q() const { return reinterpret_cast<uint8_t*>(lse() + job->lse_size()); }

  static constexpr int64_t kFlagBytes = 128;
};

// Keeps each job for as long as the workers or the device may use it. A job's memory goes on no
// worker's thread: that is a call of the driver.
class Handshake {
 public:
  // The best that the device whose context is current can do: memory operations of its streams,
  // else callbacks.
  static Status Make(std::shared_ptr<Handshake>* handshake);
  virtual ~Handshake() = default;

  // Which of them, and why not the other, in words.
  const std::string& name() const { return name_; }

  // The workers run the job once `stream` has come here; records `started`.
  virtual Status Begin(const std::shared_ptr<CudaJob>& job, cuda::Stream stream) = 0;
  // `stream` goes on when the result is in staging. Behind Begin only, or it waits for ever.
  virtual Status Await(const std::shared_ptr<CudaJob>& job, cuda::Stream stream) = 0;
  // Lets the streams pass the jobs that wait for their turn, of steps from `first_step` on. They
  // are not run: their lse is NaN.
  virtual void Release(int64_t first_step) = 0;
  // Releases all and waits for what goes on. False if that takes beyond the deadline.
  virtual bool Drain(int64_t deadline_ns) = 0;

 protected:
  explicit Handshake(std::string name) : name_(std::move(name)) {}

  const std::string name_;
  std::mutex mutex_;                           // Guards all below.
  std::deque<std::shared_ptr<CudaJob>> jobs_;  // Oldest first.
};

}  // namespace wscope
