// One engine's side of the device: its private streams and its staging.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "carrier.h"
#include "cuda_driver.h"

namespace wscope {

// A host job whose q comes from a device and whose result goes there.
struct CudaJob {
  std::shared_ptr<HostJob> job;
  std::shared_ptr<Task> task;
  std::atomic<bool> submitted{false};
  Storage q_storage;
  std::shared_ptr<cuda::PinnedBuffer> staging;  // o | lse | q
  // q has left XLA's buffer. Shared with the timing, which shall not keep the job.
  std::shared_ptr<cuda::Event> started = std::make_shared<cuda::Event>();
  cuda::Event called;  // The last callback has returned.

  float* o() const { return reinterpret_cast<float*>(staging->data()); }
  float* lse() const { return o() + job->o_size(); }
  uint8_t* q() const { return reinterpret_cast<uint8_t*>(lse() + job->lse_size()); }
};

// No function of it waits on the host for the device unless something has failed, but Drain and the
// mover's.
class CudaLane {
 public:
  // In the context that is current.
  static Status Make(std::shared_ptr<CudaLane>* lane);
  ~CudaLane();

  // False if the device uses what is ours beyond the deadline: the private streams, or XLA's.
  bool Drain(int64_t deadline_ns);
  // The part of it that touches XLA's slots.
  bool EndLoads(int64_t deadline_ns);

  // After a failure: waits until the stream has done what was begun, which may use `memory`.
  static void Settle(cuda::Stream stream, std::shared_ptr<void> memory);

  // Lets the driver call `function` with the job, behind what `calls_` has got so far, and keeps
  // the job until it has: a callback may not free what is the driver's.
  Status Call(void (*function)(void*), const std::shared_ptr<CudaJob>& job);
  Status TakePinned(int64_t bytes, std::shared_ptr<cuda::PinnedBuffer>* buffer);
  // The buffer is free once `stream` has come here.
  Status GivePinned(std::shared_ptr<cuda::PinnedBuffer> buffer, cuda::Stream stream);
  Status TakeDevice(int64_t bytes, std::shared_ptr<cuda::DeviceBuffer>* buffer);
  // The buffer is free after `done`.
  void GiveDevice(std::shared_ptr<cuda::DeviceBuffer> buffer, cuda::Event done);

 private:
  friend class OnStream;
  friend class DeviceStore;

  template <typename Buffer>
  struct Returned {
    std::shared_ptr<Buffer> buffer;
    cuda::Event done;
  };
  template <typename Buffer>
  using AllReturned = std::deque<Returned<Buffer>>;
  // The last copy into a slot.
  struct Filling {
    cuda::Event began;
    cuda::Event nearly;  // Little of it is left: the next may begin.
    std::shared_ptr<cuda::Event> ended = std::make_shared<cuda::Event>();
    std::shared_ptr<cuda::Event> before_ended;  // The copy into the other slot; may be null.
  };
  // The two PING-PONG slots and the copies into them, each slot's on a stream of its own.
  struct Pump {
    std::array<uint8_t*, 2> slots{};  // Where they were at the last call.
    std::array<std::shared_ptr<Filling>, 2> filled;
    cuda::Event freed;
    std::vector<std::shared_ptr<Pool>> pools;  // Alive as long as a copy may read them.
  };

  CudaLane() = default;
  template <typename Buffer>
  bool Release(AllReturned<Buffer>* returned, int64_t deadline_ns);

  cuda::Context context_ = nullptr;
  cuda::OwnStream calls_;                        // Callbacks that start and end host jobs.
  std::array<cuda::OwnStream, 2> loads_;         // Host to device, one for each slot.
  cuda::OwnStream stores_;                       // Device to host.
  std::mutex mutex_;                             // Guards all below.
  std::deque<std::shared_ptr<CudaJob>> called_;  // Jobs that a callback may use.
  AllReturned<cuda::PinnedBuffer> pinned_;
  AllReturned<cuda::DeviceBuffer> device_;
  Pump pump_;
  std::shared_ptr<cuda::PinnedBuffer> bounce_;  // Not guarded: the mover's alone.
};

}  // namespace wscope
