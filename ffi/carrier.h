// How bytes pass between XLA's buffers and host memory: at once (CPU), or behind a stream (CUDA).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attention.h"
#include "host_job.h"
#include "mover.h"
#include "plan.h"
#include "status.h"
#include "step.h"
#include "workers.h"

namespace wscope {

struct CudaJob;

// A host job between its host_start and its host_finish.
struct OpenJob {
  std::shared_ptr<HostJob> job;
  std::shared_ptr<Task> task;     // Null: the job has no block and is done.
  int64_t step = 0;               // The number of its step.
  int64_t returned_ns = 0;        // When host_start handed it over.
  std::shared_ptr<CudaJob> cuda;  // Staging of a job whose q comes from a device.
};

// The PING-PONG region: `count` slots of a chunk each, that take turns.
struct ChunkSlots {
  uint8_t* begin;    // [count, capacity, block_bytes]
  int64_t count;     // At least 1.
  int64_t capacity;  // Blocks of a chunk.
  int64_t block_bytes;

  // Where the load of that number in the plan brings its chunk.
  uint8_t* Of(size_t number) const {
    return begin + static_cast<int64_t>(number % count) * capacity * block_bytes;
  }
};

// One load of the plan.
struct LoadCall {
  explicit LoadCall(const ChunkSlots& slots) : slots(slots) {}

  const ChunkSlots slots;
  size_t turn = 0;  // Its number in the plan.
  std::shared_ptr<Pool> pool;
  Plan::Load now{};
  // The loads, by number, that may begin when the chunk before has been attended to: the one that
  // takes the slot of that, and at the first call those of all slots.
  size_t first_number = 0;
  std::vector<Plan::Load> begins;  // None that is too large: its own call refuses it.
};

class Carrier {
 public:
  virtual ~Carrier() = default;

  // Hands the job to the workers as soon as q is in host memory; q is free for XLA afterwards.
  virtual Status Start(const void* q, Storage q_storage, int job_delay_ms, OpenJob* open) = 0;
  // Brings the result of an ended job to o and lse. `timing` tells later what the job took.
  virtual Status Finish(OpenJob open, float* o, float* lse, TimingSource* timing) = 0;
  // `timing` is set if the copy has a time of its own.
  virtual Status Load(const LoadCall& call, TimingSource* timing) = 0;
  // Copies the plan's blocks out of XLA's buffer into what `staged` gets to own.
  virtual Status Store(const uint8_t* blocks, const std::vector<Plan::Move>& moves, Mover& mover,
                       StagedStore* staged) = 0;
};

// XLA's buffers are host memory: every copy is done when the call returns.
Carrier& HostCarrier();

}  // namespace wscope
