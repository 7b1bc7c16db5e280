#include "step_queue.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "clock.h"
#include "cuda_lane.h"
#include "size_math.h"

namespace wscope {
namespace {

using Lock = std::unique_lock<std::mutex>;

constexpr size_t kMaxOpenJobs = 2;  // What a schedule may interleave.
constexpr size_t kMaxEnded = 256;   // The oldest are dropped when nobody drains their timings.
constexpr int64_t kEndLoadsNs = 10'000'000'000;  // What a failed call waits for the copies.

std::string Text(int64_t value) { return std::to_string(value); }

// Empty if a block of this shape has `block_bytes` bytes.
std::string ShapeMismatch(const AttentionShape& shape, int64_t block_bytes) {
  const std::optional<int64_t> bytes = CheckedProduct(
      {shape.num_kv_heads, shape.block, shape.stored_dim(), ItemBytes(shape.storage)});
  if (bytes && *bytes == block_bytes) return {};
  return "host_start: num_kv_heads, block, key_dim, value_dim and storage make blocks of " +
         (bytes ? Text(*bytes) : "too many") + " bytes, the host pool has blocks of " +
         Text(block_bytes);
}

std::string BlockMismatch(const char* operand, int64_t got, int64_t want) {
  return std::string(operand) + ": a block (its last two dimensions) has " + Text(got) +
         " bytes, the pool has blocks of " + Text(want);
}

}  // namespace

void StepQueue::Push(const PlanArrays& arrays) {
  if (!creator_.IsThisProcess()) throw std::runtime_error(Creator::ForkText("push"));
  Plan plan = BuildPlan(arrays);
  if (!plan.jobs.empty() && !plan.table.empty() && Workers::Get().num_workers() == 0) {
    throw std::runtime_error(
        "push: the plan has host jobs, but there are no workers; call "
        "start_workers first");
  }
  const Lock lock(mutex_);
  if (closed_) throw std::invalid_argument("push: the step queue is closed");
  if (poison_) throw std::runtime_error("push: an earlier call failed: " + *poison_);
  pushed_.push_back(std::move(plan));
}

bool StepQueue::TakeBack() {
  const Lock lock(mutex_);
  if (pushed_.empty()) return false;
  pushed_.pop_back();
  return true;
}

Status StepQueue::Usable() const {
  if (closed_) return Status::FailedPrecondition("engine: its step queue is closed");
  if (poison_) return Status::FailedPrecondition("engine: an earlier call failed: " + *poison_);
  if (const std::optional<std::string> failure = mover_.failure()) {
    return Status::FailedPrecondition("engine: an earlier store failed: " + *failure);
  }
  return Status::Ok();
}

Status StepQueue::Fail(Status status) {
  std::shared_ptr<CudaLane> lane;
  int64_t first_lost = 0;
  {
    const Lock lock(mutex_);
    if (!poison_) poison_ = status.text;
    pushed_.clear();
    first_lost = step_number_ + (step_ ? 0 : 1);  // Steps before it keep their results.
    step_.reset();
    lane = cuda_lane_;
  }
  mover_.Interrupt();
  if (lane) lane->handshake().Release(first_lost);
  // XLA takes its buffers back when the call returns; the next load is on its way into one.
  if (lane) lane->EndLoads(NowNs() + kEndLoadsNs);
  return status;
}

Status StepQueue::NothingLeft(const char* call) const {
  const std::string name = call;
  if (!step_) {
    return Status::FailedPrecondition(name + ": no plan is in use; step_begin must come first");
  }
  return Status::FailedPrecondition(name + ": the plan has no such call left (" +
                                    step_->Progress() + ")");
}

void StepQueue::EndIfUsedUp() {
  if (!step_ || !step_->UsedUp()) return;
  if (step_->HasTiming()) {
    ended_.push_back(std::move(*step_).End());
    if (ended_.size() > kMaxEnded) ended_.pop_front();
  }
  step_.reset();
}

Status StepQueue::Begin() {
  const Lock lock(mutex_);
  if (Status status = Usable(); !status.ok()) return status;
  if (step_) {
    return Status::FailedPrecondition("step_begin: the plan before is not used up (" +
                                      step_->Progress() + ")");
  }
  if (pushed_.empty()) return Status::FailedPrecondition("step_begin: no plan was pushed");
  step_.emplace(std::move(pushed_.front()));
  pushed_.pop_front();
  ++step_number_;
  EndIfUsedUp();
  return Status::Ok();
}

Status StepQueue::StartJob(const AttentionShape& shape, int64_t num_rows, const void* q,
                           Storage q_storage, Carrier& carrier) {
  const Lock lock(mutex_);
  if (Status status = Usable(); !status.ok()) return status;
  const Plan::Job* const planned = step_ ? step_->NextJob() : nullptr;
  if (!planned) return NothingLeft("host_start");
  if (open_jobs_.size() == kMaxOpenJobs) {
    return Status::FailedPrecondition("host_start: two jobs are open; host_finish must end one");
  }
  if (num_rows != planned->num_rows) {
    return Status::InvalidArgument("q: has " + Text(num_rows) + " rows, the plan's job has " +
                                   Text(planned->num_rows));
  }
  const Plan& plan = step_->plan();
  if (plan.host_pool) {
    std::string mismatch = ShapeMismatch(shape, plan.host_pool->block_bytes());
    if (!mismatch.empty()) return Status::InvalidArgument(std::move(mismatch));
  }
  OpenJob open;
  open.step = step_number_;
  open.job = std::make_shared<HostJob>(shape, plan.host_pool, planned->layer, step_->NextRows(),
                                       std::max(1, Workers::Get().num_workers()));
  if (Status status = carrier.Start(q, q_storage, job_delay_ms_, &open); !status.ok()) {
    return status;
  }
  step_->StartedJob(open.job->num_blocks(), shape.block);
  open_jobs_.push_back(std::move(open));
  return Status::Ok();
}

Status StepQueue::FinishJob(int64_t num_rows, int64_t num_q_heads, int64_t value_dim, float* o,
                            float* lse, Carrier& carrier) {
  OpenJob open;
  {
    const Lock lock(mutex_);
    if (Status status = Usable(); !status.ok()) return status;
    if (open_jobs_.empty()) return Status::FailedPrecondition("host_finish: no job is open");
    const HostJob& job = *open_jobs_.front().job;
    const AttentionShape& shape = job.shape();
    if (num_rows != job.num_rows() || num_q_heads != shape.num_q_heads ||
        value_dim != shape.value_dim) {
      return Status::InvalidArgument("o: is [" + Text(num_rows) + ", " + Text(num_q_heads) + ", " +
                                     Text(value_dim) + "], the oldest open job makes [" +
                                     Text(job.num_rows()) + ", " + Text(shape.num_q_heads) + ", " +
                                     Text(shape.value_dim) + "]");
    }
    open = std::move(open_jobs_.front());
    open_jobs_.pop_front();
  }
  TimingSource timing;
  if (Status status = carrier.Finish(std::move(open), o, lse, &timing); !status.ok()) return status;
  const Lock lock(mutex_);
  if (!step_) return Usable();  // Another call failed meanwhile.
  step_->EndedJob();
  step_->Add(std::move(timing));
  EndIfUsedUp();
  return Status::Ok();
}

Status StepQueue::Load(const ChunkSlots& slots, Carrier& carrier) {
  LoadCall call(slots);
  {
    const Lock lock(mutex_);
    if (Status status = Usable(); !status.ok()) return status;
    const Plan::Load* const planned = step_ ? step_->NextLoad() : nullptr;
    if (!planned) return NothingLeft("load");
    call.pool = step_->plan().load_pool;
    if (planned->num_slots > slots.capacity) {
      return Status::InvalidArgument("slots: has room for " + Text(slots.capacity) +
                                     " slots, the plan's load has " + Text(planned->num_slots));
    }
    if (call.pool && slots.block_bytes != call.pool->block_bytes()) {
      return Status::InvalidArgument(
          BlockMismatch("slots", slots.block_bytes, call.pool->block_bytes()));
    }
    call.now = *planned;
    call.turn = step_->TakeLoad();
    const auto count = static_cast<size_t>(slots.count);
    call.first_number = call.turn == 0 ? 0 : call.turn + count - 1;
    call.begins = step_->Loads(call.first_number, call.turn + count, slots.capacity);
  }
  TimingSource timing;
  if (Status status = carrier.Load(call, &timing); !status.ok()) return status;
  const Lock lock(mutex_);
  if (step_) step_->Add(std::move(timing));
  EndIfUsedUp();
  return Status::Ok();
}

Status StepQueue::Store(const uint8_t* blocks, int64_t num_blocks, int64_t block_bytes,
                        Carrier& carrier) {
  Plan::Store store;
  {
    const Lock lock(mutex_);
    if (Status status = Usable(); !status.ok()) return status;
    const Plan::Store* const planned = step_ ? step_->NextStore() : nullptr;
    if (!planned) return NothingLeft("store");
    for (const Plan::Move& move : planned->moves) {
      if (move.block >= num_blocks) {
        return Status::InvalidArgument("blocks: has " + Text(num_blocks) +
                                       " blocks, the plan's store moves block " + Text(move.block));
      }
      if (block_bytes != move.pool->block_bytes()) {
        return Status::InvalidArgument(
            BlockMismatch("blocks", block_bytes, move.pool->block_bytes()));
      }
    }
    store = step_->TakeStore();
  }
  StagedStore staged;
  staged.block_bytes = block_bytes;
  if (!store.moves.empty()) {
    Status status = carrier.Store(blocks, store.moves, mover_, &staged);
    if (!status.ok()) return status;
    staged.destinations.reserve(store.moves.size());
    for (Plan::Move& move : store.moves) {
      staged.destinations.push_back({std::move(move.pool), store.layer, move.slot});
    }
  }
  mover_.Enqueue(std::move(staged));
  const Lock lock(mutex_);
  EndIfUsedUp();
  return Status::Ok();
}

std::optional<std::string> StepQueue::Poison() const {
  {
    const Lock lock(mutex_);
    if (poison_) return poison_;
  }
  return mover_.failure();
}

std::vector<StepTiming> StepQueue::DrainTimings() {
  const Lock lock(mutex_);
  std::vector<StepTiming> timings;
  while (!ended_.empty()) {
    const std::optional<StepTiming> timing = ended_.front().Timing();
    if (!timing) break;  // The device is not there yet.
    timings.push_back(*timing);
    ended_.pop_front();
  }
  return timings;
}

Status StepQueue::Cuda(std::shared_ptr<CudaLane>* lane) {
  const Lock lock(mutex_);
  Status status = cuda_lane_ ? Status::Ok() : CudaLane::Make(&cuda_lane_);
  *lane = cuda_lane_;
  return status;
}

std::string StepQueue::HandshakeName() const {
  const Lock lock(mutex_);
  if (!cuda_lane_) return "";
  return cuda_lane_->handshake().name() + "; results come by " + cuda_lane_->results()->name();
}

void StepQueue::SetFault(int store_delay_ms, int job_delay_ms) {
  mover_.set_delay_ms(store_delay_ms);
  const Lock lock(mutex_);
  job_delay_ms_ = job_delay_ms;
}

bool StepQueue::Close(int64_t deadline_ns) {
  if (!creator_.IsThisProcess()) return true;
  std::deque<OpenJob> open;
  std::shared_ptr<CudaLane> lane;
  {
    const Lock lock(mutex_);
    closed_ = true;
    pushed_.clear();
    step_.reset();
    open = open_jobs_;
    lane = cuda_lane_;
  }
  mover_.Interrupt();
  bool drained = !lane || lane->Drain(deadline_ns);
  for (const OpenJob& job : open) {
    if (!job.task || job.cuda) continue;  // The lane has seen to its own.
    if (!job.task->WaitUntil(deadline_ns)) drained = false;
  }
  if (drained) {  // Whoever holds the queue shall not hold its pools.
    const Lock lock(mutex_);
    open_jobs_.clear();  // `open` keeps them until the lock is gone.
  }
  return mover_.Drain(deadline_ns) && drained;
}

bool StepQueue::MayBeCalled() const {
  const Lock lock(mutex_);
  return !poison_ && (step_ || !pushed_.empty());
}

}  // namespace wscope
