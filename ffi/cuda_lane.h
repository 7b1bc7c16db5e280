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
#include "cuda_handshake.h"
#include "cuda_result.h"

namespace wscope {

// No function of it waits on the host for the device unless something has failed, but Drain and the
// mover's.
class CudaLane {
 public:
  // The last copy into a slot. It might have begun when the slot was free and the copy before it
  // had ended; when it did, somebody else's copies have a say in, which the device makes in turns.
  struct Filling {
    std::shared_ptr<cuda::Event> freed, ended;
    std::shared_ptr<cuda::Event> before;  // The end of the copy before; null for the first one.
    int64_t took_ns() const;              // What it took from then on; it has ended.
    int64_t idle_ns() const;              // From the copy before until the slot was free.
  };

  // In the context that is current.
  static Status Make(std::shared_ptr<CudaLane>* lane);
  ~CudaLane();

  // Lets XLA's stream pass the waiting jobs. False if a worker or the device uses what is ours
  // beyond the deadline: the private streams, or XLA's.
  bool Drain(int64_t deadline_ns);
  // The part of it that touches XLA's slots.
  bool EndLoads(int64_t deadline_ns);

  // After a failure: waits until the stream has done what was begun, which may use `memory`. If it
  // hangs, the memory is kept for ever, and false comes back.
  static bool Settle(cuda::Stream stream, std::shared_ptr<void> memory);

  Handshake& handshake() { return *handshake_; }
  const std::shared_ptr<const ResultCarrier>& results() const { return results_; }
  std::shared_ptr<cuda::Event> TakeEvent() { return events_.Take(); }
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
  // Staging of jobs, and where XLA's stream was when it was given back: in that order.
  struct Staging {
    std::shared_ptr<cuda::PinnedBuffer> buffer;
    std::shared_ptr<cuda::Event> done;
  };
  // The PING-PONG slots and the copies into them.
  struct Pump {
    std::array<uint8_t*, 2> slots{};           // Where the first two were at the last call.
    std::vector<Filling> filled;               // Of each slot.
    std::shared_ptr<cuda::Event> freed;        // By XLA's stream, the slot of the chunk before.
    std::shared_ptr<cuda::Event> last;         // The end of the newest copy.
    std::vector<std::shared_ptr<Pool>> pools;  // Alive as long as a copy may read them.
  };

  CudaLane() = default;
  template <typename All>
  bool Release(All* returned, int64_t deadline_ns);

  cuda::Context context_ = nullptr;
  std::shared_ptr<Handshake> handshake_;
  std::shared_ptr<const ResultCarrier> results_;
  cuda::EventPool events_;
  cuda::OwnStream loads_;   // Host to device.
  cuda::OwnStream stores_;  // Device to host.
  std::mutex mutex_;        // Guards all below.
  std::deque<Staging> pinned_;
  AllReturned<cuda::DeviceBuffer> device_;
  Pump pump_;
  std::shared_ptr<cuda::PinnedBuffer> bounce_;  // Not guarded: the mover's alone.
};

}  // namespace wscope
