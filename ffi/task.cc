#include "task.h"

#include <chrono>
#include <utility>

#include "spin.h"

namespace wscope {

Task::Task(int num_parts, std::function<void(int)> run, std::function<void()> finish,
           std::function<void()> drop, Approach approach)
    : num_parts_(num_parts),
      run_(std::move(run)),
      finish_(std::move(finish)),
      drop_(std::move(drop)),
      approach_(approach ? std::make_shared<const Approach>(std::move(approach)) : nullptr),
      taken_(num_parts),
      parts_left_(num_parts) {}

int Task::Take(int worker) {
  while (taken_[first_left_]) ++first_left_;
  const int part = worker < num_parts_ && !taken_[worker] ? worker : first_left_;
  taken_[part] = true;
  ++num_taken_;
  return part;
}

bool Task::RunPart(int part) {
  int64_t unset = 0;
  start_ns_.compare_exchange_strong(unset, NowNs(), std::memory_order_relaxed);
  run_(part);
  if (parts_left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  if (finish_) finish_();
  end_ns_ = NowNs();
  Forget();
  return true;
}

void Task::Drop() {
  if (drop_) drop_();
  Forget();
  Signal();
}

void Task::Forget() {
  run_ = nullptr;
  finish_ = nullptr;
  drop_ = nullptr;
  approach_ = nullptr;
}

void Task::RunHere() {
  for (int part = 0; part < num_parts_; ++part) RunPart(part);
  Signal();
}

void Task::Signal() {
  const std::lock_guard<std::mutex> lock(mutex_);
  done_.store(true, std::memory_order_release);
  ended_.notify_all();
}

void Task::Wait() {
  if (Spin(kSpinNs, [this] { return done(); })) return;
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [this] { return done(); });
}

bool Task::WaitUntil(int64_t deadline_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto deadline =
      std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline_ns));
  return ended_.wait_until(lock, deadline, [this] { return done(); });
}

}  // namespace wscope
