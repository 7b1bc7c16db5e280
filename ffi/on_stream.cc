#include "on_stream.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

#include "cuda_store.h"

namespace wscope {
namespace {

using Lock = std::unique_lock<std::mutex>;
using cuda::Address;
using cuda::Check;

const cuda::Driver& Cu() { return *cuda::GetDriver(); }

// Whole blocks of a store that lie one after the other on both sides.
template <typename Copy>
Status ForEachRun(const std::vector<Plan::Move>& moves, const Copy& copy) {
  for (size_t first = 0; first < moves.size();) {
    size_t end = first + 1;
    while (end < moves.size() && moves[end].block == moves[end - 1].block + 1) ++end;
    if (Status status = copy(moves[first].block, first, end - first); !status.ok()) return status;
    first = end;
  }
  return Status::Ok();
}

}  // namespace

Status OnStream::Start(const void* q, Storage q_storage, int job_delay_ms, OpenJob* open) {
  auto held = std::make_shared<CudaJob>();
  held->job = open->job;
  held->step = open->step;
  if (open->job->num_parts() > 0) {
    held->started = lane_->TakeEvent();
    held->carrier = lane_->results();
    if (Status status = StartJob(q, q_storage, job_delay_ms, held); !status.ok()) {
      if (held->staging) CudaLane::Settle(stream_, held);
      return status;
    }
  }
  open->task = held->task;
  open->cuda = std::move(held);
  return Status::Ok();
}

Status OnStream::StartJob(const void* q, Storage q_storage, int job_delay_ms,
                          const std::shared_ptr<CudaJob>& held) {
  const int64_t q_bytes = held->job->q_size() * ItemBytes(q_storage);
  const int64_t results = (held->job->o_size() + held->job->lse_size()) * sizeof(float);
  Status status = lane_->TakePinned(CudaJob::kFlagBytes + results + q_bytes, &held->staging);
  if (!status.ok()) return status;
  new (held->ready()) Flag(0);
  new (held->done()) Flag(0);
  held->job->Bind(held->q(), q_storage, held->o(), held->lse());
  held->task = MakeTask(held->job, job_delay_ms,
                        [done = held->done()] { done->store(1, std::memory_order_release); });
  // On XLA's stream: q may be overwritten before the job has ended.
  status = Check(Cu().MemcpyDtoHAsync(held->q(), Address(q), q_bytes, stream_), "q");
  return status.ok() ? lane_->handshake().Begin(held, stream_) : status;
}

Status OnStream::Finish(OpenJob open, float* o, float* lse, TimingSource* timing) {
  const std::shared_ptr<CudaJob> held = open.cuda;
  const int64_t o_size = held->job->o_size();
  const int64_t lse_size = held->job->lse_size();
  if (held->staging == nullptr) {  // Zeros and minus infinity; it takes no time worth telling.
    return First({Check(Cu().MemsetD32Async(Address(o), 0, o_size, stream_), "o"),
                  Check(Cu().MemsetD32Async(Address(lse), 0xff800000u, lse_size, stream_), "lse")});
  }
  const std::shared_ptr<cuda::Event> entered = lane_->TakeEvent(), waited = lane_->TakeEvent();
  Status status = entered->Record(stream_);
  if (status.ok()) status = lane_->handshake().Await(held, stream_);
  if (!status.ok()) return status;
  status = waited->Record(stream_);
  if (status.ok()) {
    status = lane_->results()->Carry(held->o(), o_size, lse_size, o, lse, stream_);
  }
  if (status.ok()) status = lane_->GivePinned(held->staging, stream_);
  if (!status.ok()) {
    CudaLane::Settle(stream_, held);
    return status;
  }
  *timing = [started = held->started, entered, waited,
             task = open.task]() -> std::optional<StepTiming> {
    // The stream may be a moment ahead of the worker that has let it go.
    if (!waited->Done() || !task->done()) return std::nullopt;
    StepTiming took;
    took.cpu_ns = task->end_ns() - task->start_ns();
    took.wait_cpu_ns = waited->Since(*entered);
    took.wait_link_ns = std::max<int64_t>(0, entered->Since(*started) - took.cpu_ns);
    return took;
  };
  return Status::Ok();
}

Status OnStream::Fill(const LoadCall& call, const Plan::Load& load, size_t number) {
  CudaLane::Pump& pump = lane_->pump_;
  const cuda::Stream stream = lane_->loads_.get();
  const int64_t block_bytes = call.slots.block_bytes, bytes = load.num_slots * block_bytes;
  CudaLane::Filling filling{pump.freed, lane_->TakeEvent(), pump.last};
  Status status = pump.freed->MakeWait(stream);
  for (int64_t done = 0; status.ok() && done < bytes;) {
    const uint8_t* const from = call.pool->Block(load.layer, load.first_slot) + done;
    const int64_t run = call.pool->PinnedRun(load.first_slot * block_bytes + done, bytes - done);
    const cuda::DevicePtr to = Address(call.slots.Of(number)) + done;
    status = Check(Cu().MemcpyHtoDAsync(to, from, run, stream), "load");
    done += run;
  }
  if (status.ok()) status = filling.ended->Record(stream);
  pump.last = filling.ended;
  pump.filled[number % pump.filled.size()] = std::move(filling);
  return status;
}

Status OnStream::Load(const LoadCall& call, TimingSource* timing) {
  const Lock lock(lane_->mutex_);
  CudaLane::Pump& pump = lane_->pump_;
  const std::array<uint8_t*, 2> slots{call.slots.Of(0), call.slots.Of(1)};
  const auto count = static_cast<size_t>(call.slots.count);
  if (call.turn > 0 && (pump.slots != slots || pump.filled.size() != count)) {
    return Status::Internal(
        "load: the PING-PONG slots have moved within a step, and a copy into them is under way; "
        "the program must pass them on in place");
  }
  pump.slots = slots;
  pump.filled.resize(count);
  if (call.pool && (pump.pools.empty() || pump.pools.back() != call.pool)) {
    if (lane_->loads_.Query() == 0) pump.pools.clear();
    pump.pools.push_back(call.pool);
  }
  // The attention over the chunk before, which this call comes behind, has read its slot.
  pump.freed = lane_->TakeEvent();
  Status status = pump.freed->Record(stream_);
  for (size_t i = 0; status.ok() && i < call.begins.size(); ++i) {
    status = Fill(call, call.begins[i], call.first_number + i);
  }
  if (!status.ok()) return status;
  const CudaLane::Filling filled = pump.filled[call.turn % count];
  // Of a surplus turn, too, which may have waited for its slot. What the first copy waited for was
  // no slot, but the step's begin.
  *timing = [filled, copies = call.now.num_slots > 0,
             waits = call.turn > 0]() -> std::optional<StepTiming> {
    if (!filled.ended->Done()) return std::nullopt;
    StepTiming took;
    if (copies) took.link_ns = filled.took_ns();
    if (waits) took.link_idle_ns = filled.idle_ns();
    return took;
  };
  return filled.ended->MakeWait(stream_);
}

Status OnStream::Store(const uint8_t* blocks, const std::vector<Plan::Move>& moves, Mover&,
                       StagedStore* staged) {
  const int64_t bytes = staged->block_bytes;
  std::shared_ptr<cuda::DeviceBuffer> buffer;
  Status status = lane_->TakeDevice(bytes * static_cast<int64_t>(moves.size()), &buffer);
  if (!status.ok()) {
    status.text = "store: no room on the GPU for the blocks on their way out (" + status.text +
                  "); give JAX less of its memory (XLA_PYTHON_CLIENT_MEM_FRACTION)";
    return status;
  }
  status = ForEachRun(moves, [&](int64_t block, size_t first, size_t count) {
    return Check(Cu().MemcpyDtoDAsync(buffer->data() + first * bytes,
                                      Address(blocks) + block * bytes, count * bytes, stream_),
                 "store");
  });
  cuda::Event copied;
  if (status.ok()) status = copied.Record(stream_);
  if (!status.ok()) {
    CudaLane::Settle(stream_, buffer);
    return status;
  }
  staged->device = std::make_unique<DeviceStore>(lane_, std::move(buffer), std::move(copied));
  return status;
}

}  // namespace wscope
