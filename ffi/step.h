// A plan in use: how far it is used up, and what its calls took.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host_job.h"
#include "plan.h"

namespace wscope {

// Sums over the calls of one plan, in nanoseconds and entries of one layer.
struct StepTiming {
  int64_t cpu_ns = 0;  // Jobs: from the first worker's start to the last one's end.
  // CUDA: the copies of the loads, and what they waited for others'. CPU: host_start to
  // host_finish.
  int64_t link_ns = 0;
  int64_t link_idle_ns = 0;      // CUDA: copies waited for a slot. CPU: the same as wait_cpu_ns.
  int64_t wait_cpu_ns = 0;       // What host_finish waited for the workers.
  int64_t wait_link_ns = 0;      // What ended jobs waited for host_finish.
  int64_t host_entries = 0;      // Attended by the jobs.
  int64_t streamed_entries = 0;  // Copied by the loads; the block size is that of the jobs.
};

// What one call took, empty as long as a device has not told.
using TimingSource = std::function<std::optional<StepTiming>()>;

// A step that was launched to its end, and what is to be asked for its timing.
struct EndedStep {
  int64_t host_entries;
  int64_t streamed_entries;
  std::vector<TimingSource> calls;

  // Empty as long as one of its calls does not know.
  std::optional<StepTiming> Timing() const;
};

class Step {
 public:
  explicit Step(Plan plan) : plan_(std::move(plan)) {}

  const Plan& plan() const { return plan_; }

  // The item that the next call takes; null if there is none.
  const Plan::Job* NextJob() const { return Next(plan_.jobs, jobs_started_); }
  const Plan::Load* NextLoad() const { return Next(plan_.loads, loads_); }
  const Plan::Store* NextStore() const { return Next(plan_.stores, stores_); }

  // The blocks of the next job's rows; jobs over the same rows share one list.
  const std::shared_ptr<const RowBlocks>& NextRows();
  // The next job was started over `num_blocks` blocks of `block` entries.
  void StartedJob(int64_t num_blocks, int block) {
    ++jobs_started_;
    entries_per_block_ = block;
    host_blocks_ += num_blocks;
  }
  void EndedJob() { ++jobs_ended_; }
  // What a call took, or nothing.
  void Add(TimingSource timing) {
    if (timing) timings_.push_back(std::move(timing));
  }
  // Takes the next load; returns its place in the plan.
  size_t TakeLoad() {
    streamed_blocks_ += plan_.loads[loads_].num_slots;
    return loads_++;
  }
  // The loads [first, end), up to the first of more than `capacity` blocks, if there are so many.
  std::vector<Plan::Load> Loads(size_t first, size_t end, int64_t capacity) const;
  Plan::Store TakeStore() { return std::move(plan_.stores[stores_++]); }

  bool UsedUp() const {
    return jobs_ended_ == plan_.jobs.size() && loads_ == plan_.loads.size() &&
           stores_ == plan_.stores.size();
  }
  // How much of the plan is used, in words.
  std::string Progress() const;

  bool HasTiming() const { return !plan_.jobs.empty() || !plan_.loads.empty(); }
  EndedStep End() &&;

 private:
  template <typename Item>
  static const Item* Next(const std::vector<Item>& items, size_t used) {
    return used < items.size() ? &items[used] : nullptr;
  }

  struct Rows {
    int first, count;
    std::shared_ptr<const RowBlocks> blocks;
  };

  Plan plan_;
  std::vector<Rows> rows_;  // As many as a program cuts its batch into: few.
  size_t jobs_started_ = 0;
  size_t jobs_ended_ = 0;
  size_t loads_ = 0;
  size_t stores_ = 0;
  int64_t entries_per_block_ = 0;  // As the jobs say; 0 before the first.
  int64_t host_blocks_ = 0;
  int64_t streamed_blocks_ = 0;
  std::vector<TimingSource> timings_;
};

}  // namespace wscope
