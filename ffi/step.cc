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

StepTiming Step::FinalTiming() const {
  StepTiming timing = timing_;
  timing.host_entries = host_blocks_ * entries_per_block_;
  timing.streamed_entries = streamed_blocks_ * entries_per_block_;
  return timing;
}

}  // namespace wscope
