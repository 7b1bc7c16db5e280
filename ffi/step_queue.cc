#include "step_queue.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "clock.h"
#include "size_math.h"

namespace wscope {
namespace {

using Lock = std::unique_lock<std::mutex>;

constexpr size_t kMaxOpenJobs = 2;    // What a schedule may interleave.
constexpr size_t kMaxTimings = 4096;  // The oldest are dropped when nobody drains them.

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

Status StepQueue::Usable() const {
  if (closed_) return Status::FailedPrecondition("engine: its step queue is closed");
  if (poison_) return Status::FailedPrecondition("engine: an earlier call failed: " + *poison_);
  return Status::Ok();
}

Status StepQueue::Fail(Status status) {
  {
    const Lock lock(mutex_);
    if (!poison_) poison_ = status.text;
    pushed_.clear();
    step_.reset();
  }
  mover_.Interrupt();
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
    timings_.push_back(step_->FinalTiming());
    if (timings_.size() > kMaxTimings) timings_.pop_front();
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
  EndIfUsedUp();
  return Status::Ok();
}

Status StepQueue::StartJob(const AttentionShape& shape, int64_t num_rows, const void* q,
                           Storage q_storage) {
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
  open.job = std::make_shared<HostJob>(shape, plan.host_pool, planned->layer, planned->num_rows,
                                       plan.row_ptr.data() + planned->first_row, plan.table.data(),
                                       std::max(1, Workers::Get().num_workers()));
  if (open.job->num_parts() > 0) {
    CopyToFloat(q, q_storage, open.job->q_size(), open.job->q());
    open.task = MakeTask(open.job, job_delay_ms_);
    if (!Workers::Get().Submit(open.task)) {
      return Status::FailedPrecondition("host_start: there are no workers; call start_workers");
    }
  }
  step_->StartedJob(open.job->num_blocks(), shape.block);
  open.returned_ns = NowNs();
  open_jobs_.push_back(std::move(open));
  return Status::Ok();
}

Status StepQueue::FinishJob(int64_t num_rows, int64_t num_q_heads, int64_t value_dim, float* o,
                            float* lse) {
  const int64_t entry_ns = NowNs();
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
  if (open.task) open.task->Wait();
  const int64_t waited_until_ns = NowNs();
  std::memcpy(o, open.job->o(), open.job->o_size() * sizeof(float));
  std::memcpy(lse, open.job->lse(), open.job->lse_size() * sizeof(float));
  const Lock lock(mutex_);
  if (!step_) return Usable();  // Another call failed meanwhile.
  StepTiming& timing = step_->timing();
  timing.link_ns += entry_ns - open.returned_ns;
  if (open.task) {
    timing.cpu_ns += open.task->end_ns() - open.task->start_ns();
    timing.wait_cpu_ns += waited_until_ns - entry_ns;
    timing.wait_link_ns += std::max<int64_t>(0, entry_ns - open.task->end_ns());
  }
  step_->EndedJob();
  EndIfUsedUp();
  return Status::Ok();
}

Status StepQueue::Load(uint8_t* slots, int64_t capacity, int64_t block_bytes) {
  Plan::Load load;
  std::shared_ptr<Pool> pool;
  size_t turn = 0;
  {
    const Lock lock(mutex_);
    if (Status status = Usable(); !status.ok()) return status;
    const Plan::Load* const planned = step_ ? step_->NextLoad() : nullptr;
    if (!planned) return NothingLeft("load");
    pool = step_->plan().load_pool;
    if (planned->num_slots > capacity) {
      return Status::InvalidArgument("slots: has room for " + Text(capacity) +
                                     " slots, the plan's load has " + Text(planned->num_slots));
    }
    if (pool && block_bytes != pool->block_bytes()) {
      return Status::InvalidArgument(BlockMismatch("slots", block_bytes, pool->block_bytes()));
    }
    std::tie(load, turn) = step_->TakeLoad();
  }
  if (load.num_slots > 0) {
    std::memcpy(slots + (turn % 2) * capacity * block_bytes,
                pool->Block(load.layer, load.first_slot), load.num_slots * block_bytes);
  }
  const Lock lock(mutex_);
  EndIfUsedUp();
  return Status::Ok();
}

Status StepQueue::Store(const uint8_t* blocks, int64_t num_blocks, int64_t block_bytes) {
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
    staged.staging = mover_.TakeBuffer(block_bytes * static_cast<int64_t>(store.moves.size()));
    staged.destinations.reserve(store.moves.size());
  }
  uint8_t* to = staged.staging.bytes.get();
  for (Plan::Move& move : store.moves) {
    std::memcpy(to, blocks + move.block * block_bytes, block_bytes);
    to += block_bytes;
    staged.destinations.push_back({std::move(move.pool), store.layer, move.slot});
  }
  mover_.Enqueue(std::move(staged));
  const Lock lock(mutex_);
  EndIfUsedUp();
  return Status::Ok();
}

bool StepQueue::Idle() const {
  const Lock lock(mutex_);
  return !step_ && pushed_.empty();
}

std::optional<std::string> StepQueue::Poison() const {
  const Lock lock(mutex_);
  return poison_;
}

std::vector<StepTiming> StepQueue::DrainTimings() {
  const Lock lock(mutex_);
  std::vector<StepTiming> timings(timings_.begin(), timings_.end());
  timings_.clear();
  return timings;
}

void StepQueue::SetFault(int store_delay_ms, int job_delay_ms) {
  mover_.set_delay_ms(store_delay_ms);
  const Lock lock(mutex_);
  job_delay_ms_ = job_delay_ms;
}

bool StepQueue::Close(int64_t deadline_ns) {
  if (!creator_.IsThisProcess()) return true;
  std::deque<OpenJob> open;
  {
    const Lock lock(mutex_);
    closed_ = true;
    pushed_.clear();
    step_.reset();
    open = open_jobs_;
  }
  mover_.Interrupt();
  bool drained = true;
  for (const OpenJob& job : open) {
    if (job.task && !job.task->WaitUntil(deadline_ns)) drained = false;
  }
  return mover_.Drain(deadline_ns) && drained;
}

Registry<StepQueue>& StepQueues() {
  static auto* const queues = new Registry<StepQueue>;  // Never destroyed, like the workers.
  return *queues;
}

}  // namespace wscope
