// One engine's side of the device: its private streams and its staging.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "carrier.h"
#include "cuda_driver.h"

namespace wscope {

// A host job whose q comes from a device and whose result goes there.
struct CudaJob {
  std::shared_ptr<HostJob> job;
  std::shared_ptr<Task> task;
  Storage q_storage;
  std::shared_ptr<cuda::PinnedBuffer> staging;  // o | lse | q
  cuda::Event started;                          // q has left XLA's buffer.
  cuda::Event called;                           // The last callback has returned.

  float* o() const { return reinterpret_cast<float*>(staging->data()); }
  float* lse() const { return o() + job->o_size(); }
  uint8_t* q() const { return reinterpret_cast<uint8_t*>(lse() + job->lse_size()); }
};

// No function of it waits on the host for the device, but Drain and the mover's.
class CudaLane : public std::enable_shared_from_this<CudaLane> {
 public:
  // In the context that is current.
  static Status Make(std::shared_ptr<CudaLane>* lane);
  ~CudaLane();

  // False if work on the private streams goes on beyond the deadline.
  bool Drain(int64_t deadline_ns);

  // Lets the driver call `function` with the job, behind what `calls_` has got so far, and keeps
  // the job until it has: a callback may not free what is the driver's.
  Status Call(void (*function)(void*), const std::shared_ptr<CudaJob>& job);
  Status TakePinned(int64_t bytes, std::shared_ptr<cuda::PinnedBuffer>* buffer);
  // The buffer is free once `stream` has come here.
  Status GivePinned(std::shared_ptr<cuda::PinnedBuffer> buffer, cuda::Stream stream);
  Status TakeDevice(int64_t bytes, std::shared_ptr<cuda::DeviceBuffer>* buffer);
  void GiveDevice(std::shared_ptr<cuda::DeviceBuffer> buffer);

 private:
  friend class OnStream;
  friend class DeviceStore;

  struct Returned {
    std::shared_ptr<cuda::PinnedBuffer> buffer;
    cuda::Event done;
  };
  // The last copy into a slot.
  struct Filling {
    cuda::Event began, ended;
  };
  // The two PING-PONG slots and the copies into them.
  struct Pump {
    uint8_t* slots = nullptr;  // Where they were at the last call.
    std::array<std::shared_ptr<Filling>, 2> filled;
    cuda::Event freed;
    std::shared_ptr<Pool> pool;  // Alive as long as a copy may read it.
  };

  CudaLane() = default;
  bool Idle() const { return calls_.Done() && loads_.Done() && stores_.Done(); }

  cuda::Context context_ = nullptr;
  cuda::OwnStream calls_;                        // Callbacks that start and end host jobs.
  cuda::OwnStream loads_;                        // Host to device.
  cuda::OwnStream stores_;                       // Device to host.
  std::mutex mutex_;                             // Guards all below.
  std::deque<std::shared_ptr<CudaJob>> called_;  // Jobs that a callback may use.
  std::deque<Returned> pinned_;
  std::deque<std::shared_ptr<cuda::DeviceBuffer>> device_;
  std::shared_ptr<cuda::PinnedBuffer> bounce_;  // Of the mover alone.
  Pump pump_;
};

// The calls of a program that XLA runs on `stream`.
class OnStream : public Carrier {
 public:
  OnStream(std::shared_ptr<CudaLane> lane, cuda::Stream stream)
      : lane_(std::move(lane)), stream_(stream) {}

  Status Start(const void* q, Storage q_storage, int job_delay_ms, OpenJob* open) override;
  Status Finish(OpenJob open, float* o, float* lse, TimingSource* timing) override;
  // Brings `now` if nobody has yet, and sends `next` on its way while XLA works on `now`.
  Status Load(const LoadCall& call, TimingSource* timing) override;
  Status Store(const uint8_t* blocks, const std::vector<Plan::Move>& moves, Mover& mover,
               StagedStore* staged) override;

 private:
  Status Fill(const LoadCall& call, const Plan::Load& load, size_t number);

  const std::shared_ptr<CudaLane> lane_;
  const cuda::Stream stream_;
};

}  // namespace wscope
