// One engine's plans and the calls that use them up.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "attention.h"
#include "carrier.h"
#include "host_job.h"
#include "mover.h"
#include "plan.h"
#include "registry.h"
#include "status.h"
#include "step.h"
#include "workers.h"

namespace wscope {

class CudaLane;

// Calls are paired with the plan by their order. Plans are used first in, first out; a program's
// calls run one after the other (data dependence), so the order is the program's. The first call
// that fails poisons the queue: plans are dropped, every later call gets the first text.
class StepQueue {
 public:
  // Throws std::system_error when the system refuses the mover's thread.
  StepQueue() = default;
  StepQueue(const StepQueue&) = delete;
  StepQueue& operator=(const StepQueue&) = delete;

  // Throws std::invalid_argument for a plan that cannot be carried out, std::runtime_error if the
  // queue is poisoned or closed, if there is work and no worker, or in a forked child.
  void Push(const PlanArrays& arrays);
  // Drops the plan that was pushed last, if its program has not begun; false if it has.
  bool TakeBack();

  // The calls of a program. Sizes are checked against the plan and its pools; `carrier` moves the
  // bytes.
  Status Begin();
  // q: `num_rows` rows of [H, K] in `q_storage`.
  Status StartJob(const AttentionShape& shape, int64_t num_rows, const void* q, Storage q_storage,
                  Carrier& carrier = HostCarrier());
  // o [b, H, V] and lse [b, H] of the oldest open job.
  Status FinishJob(int64_t num_rows, int64_t num_q_heads, int64_t value_dim, float* o, float* lse,
                   Carrier& carrier = HostCarrier());
  Status Load(const ChunkSlots& slots, Carrier& carrier = HostCarrier());
  // blocks: [num_blocks, block_bytes].
  Status Store(const uint8_t* blocks, int64_t num_blocks, int64_t block_bytes,
               Carrier& carrier = HostCarrier());

  // This queue's side of the device whose context is current; made when first asked for.
  Status Cuda(std::shared_ptr<CudaLane>* lane);

  // How the turn passes between this queue's device and the workers, and why so, in words. Empty
  // before the first call on a device.
  std::string HandshakeName() const;

  // Keeps the first text, drops the plans, ends waits for tickets and for the jobs of the step that
  // fails. Returns `status`.
  Status Fail(Status status);

  // Nothing is pushed, the current plan is used up and its jobs are ended.
  bool Idle() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !step_ && pushed_.empty();
  }
  std::optional<std::string> Poison() const;
  std::vector<StepTiming> DrainTimings();
  void SetFault(int store_delay_ms, int job_delay_ms);
  const Mover& mover() const { return mover_; }
  bool WaitCompleted(int64_t ticket, int64_t deadline_ns) {
    return mover_.WaitCompleted(ticket, deadline_ns);
  }

  // Refuses what comes later, waits for open jobs and for the mover. False if the deadline passed
  // first. Does nothing in a forked child.
  bool Close(int64_t deadline_ns);
  // Whether a program that was dispatched may still make calls: a plan is not used up.
  bool MayBeCalled() const;
  bool OwnedByThisProcess() const { return creator_.IsThisProcess(); }

 private:
  Status Usable() const;
  Status NothingLeft(const char* call) const;
  void EndIfUsedUp();

  const Creator creator_;
  Mover mover_;
  mutable std::mutex mutex_;  // Guards all below.
  std::deque<Plan> pushed_;
  std::optional<Step> step_;       // Empty once used up.
  int64_t step_number_ = 0;        // Of the step that was begun last.
  std::deque<OpenJob> open_jobs_;  // Oldest first.
  std::deque<EndedStep> ended_;
  std::shared_ptr<CudaLane> cuda_lane_;
  std::optional<std::string> poison_;
  bool closed_ = false;
  int job_delay_ms_ = 0;
};

// The queues that compiled programs name.
inline Registry<StepQueue>& StepQueues() {
  static auto* const queues = new Registry<StepQueue>;  // Never destroyed, like the workers.
  return *queues;
}

}  // namespace wscope
