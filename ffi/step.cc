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

const std::shared_ptr<const RowBlocks>& Step::NextRows() {
  const Plan::Job& job = plan_.jobs[jobs_started_];
  for (const Rows& rows : rows_) {
    if (rows.first == job.first_row && rows.count == job.num_rows) return rows.blocks;
  }
  auto blocks =
      std::make_shared<RowBlocks>(plan_.host_pool.get(), job.num_rows,
                                  plan_.row_ptr.data() + job.first_row, plan_.table.data());
  rows_.push_back({job.first_row, job.num_rows, std::move(blocks)});
  return rows_.back().blocks;
}

std::vector<Plan::Load> Step::Loads(size_t first, size_t end, int64_t capacity) const {
  std::vector<Plan::Load> loads;
  for (size_t i = first; i < std::min(end, plan_.loads.size()); ++i) {
    if (plan_.loads[i].num_slots > capacity) break;
    loads.push_back(plan_.loads[i]);
  }
  return loads;
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
    sum.link_idle_ns += call->link_idle_ns;
    sum.wait_cpu_ns += call->wait_cpu_ns;
    sum.wait_link_ns += call->wait_link_ns;
  }
  sum.host_entries = host_entries;
  sum.streamed_entries = streamed_entries;
  return sum;
}

}  // namespace wscope
