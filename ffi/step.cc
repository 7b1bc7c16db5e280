#include "step.h"

namespace wscope {

std::string Step::Progress() const {
  const auto part = [](size_t used, size_t all, const char* what) {
    return std::to_string(used) + " of " + std::to_string(all) + " " + what;
  };
  return part(jobs_started_, plan_.jobs.size(), "jobs started") + ", " +
         part(jobs_ended_, plan_.jobs.size(), "ended") + ", " +
         part(loads_, plan_.loads.size(), "loads") + " and " +
         part(stores_, plan_.stores.size(), "stores called");
}

EndedStep Step::End() && {
  return {host_blocks_ * entries_per_block_, streamed_blocks_ * entries_per_block_,
          std::move(timings_)};
}

std::optional<StepTiming> EndedStep::Timing() const {
  StepTiming sum;
  for (const TimingSource& source : calls) {
    const std::optional<StepTiming> call = source();
    if (!call) return std::nullopt;
    sum.cpu_ns += call->cpu_ns;
    sum.link_ns += call->link_ns;
    sum.wait_cpu_ns += call->wait_cpu_ns;
    sum.wait_link_ns += call->wait_link_ns;
  }
  sum.host_entries = host_entries;
  sum.streamed_entries = streamed_entries;
  return sum;
}

}  // namespace wscope
