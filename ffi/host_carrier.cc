#include <algorithm>
#include <cstring>
#include <utility>

#include "carrier.h"
#include "clock.h"

namespace wscope {
namespace {

class AtOnce : public Carrier {
 public:
  Status Start(const void* q, Storage q_storage, int job_delay_ms, OpenJob* open) override {
    open->job->BindCopy(q, q_storage);
    if (open->job->num_parts() > 0) {
      open->task = MakeTask(open->job, job_delay_ms);
      if (!Workers::Get().Submit(open->task)) {
        return Status::FailedPrecondition("host_start: there are no workers; call start_workers");
      }
    }
    open->returned_ns = NowNs();
    return Status::Ok();
  }

  Status Finish(OpenJob open, float* o, float* lse, TimingSource* timing) override {
    const int64_t entry_ns = NowNs();
    if (open.task) open.task->Wait();
    const int64_t waited_until_ns = NowNs();
    std::memcpy(o, open.job->o(), open.job->o_size() * sizeof(float));
    std::memcpy(lse, open.job->lse(), open.job->lse_size() * sizeof(float));
    StepTiming took;
    took.link_ns = entry_ns - open.returned_ns;
    if (open.task) {
      took.cpu_ns = open.task->end_ns() - open.task->start_ns();
      took.link_idle_ns = took.wait_cpu_ns = waited_until_ns - entry_ns;
      took.wait_link_ns = std::max<int64_t>(0, entry_ns - open.task->end_ns());
    }
    *timing = [took] { return std::optional(took); };
    return Status::Ok();
  }

  Status Load(const LoadCall& call, TimingSource*) override {
    if (call.now.num_slots > 0) {
      std::memcpy(call.slots.Of(call.turn), call.pool->Block(call.now.layer, call.now.first_slot),
                  call.now.num_slots * call.slots.block_bytes);
    }
    return Status::Ok();
  }

  Status Store(const uint8_t* blocks, const std::vector<Plan::Move>& moves, Mover& mover,
               StagedStore* staged) override {
    staged->staging = mover.TakeBuffer(staged->block_bytes * static_cast<int64_t>(moves.size()));
    uint8_t* to = staged->staging.bytes.get();
    for (const Plan::Move& move : moves) {
      std::memcpy(to, blocks + move.block * staged->block_bytes, staged->block_bytes);
      to += staged->block_bytes;
    }
    return Status::Ok();
  }
};

}  // namespace

Carrier& HostCarrier() {
  static AtOnce carrier;
  return carrier;
}

}  // namespace wscope
