// Work for the workers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace wscope {

// Work cut into parts that workers take one at a time, each first the one of its number. Which one
// runs a part is chance all the same; what a part does must depend on its number only, so that
// results repeat bit by bit.
class Task {
 public:
  // Brings nearer what `part` is going to read, a piece a call, `step` counting up from 0; false
  // when there is no more. It may be called at any time, while parts run and after them too, and
  // must not be needed.
  using Approach = std::function<bool(int part, int step)>;

  // `run(part)` is called once for each part in [0, num_parts), `finish()` after the last of them
  // by the worker that ran it. Neither may throw. num_parts is at least 1.
  // `drop()` is called instead of both if the task is disarmed before its turn. `approach`, if any,
  // is for workers that wait for the task.
  Task(int num_parts, std::function<void(int)> run, std::function<void()> finish = {},
       std::function<void()> drop = {}, Approach approach = {});

  // Returns when finish() or drop() has ended.
  void Wait();
  // False if `deadline_ns` (of NowNs) passed first.
  bool WaitUntil(int64_t deadline_ns);
  // Runs all parts on this thread: for a task that Submit refused.
  void RunHere();
  bool done() const { return done_.load(std::memory_order_acquire); }

  // When the first part began and finish() ended; valid once done, 0 if it was dropped.
  int64_t start_ns() const { return start_ns_.load(std::memory_order_relaxed); }
  int64_t end_ns() const { return end_ns_; }

 private:
  friend class Workers;
  // A part for the worker of that number: its own, or else the first that is left. With the mutex
  // of Workers held, like the next.
  int Take(int worker);
  bool AllTaken() const { return num_taken_ == num_parts_; }
  bool RunPart(int part);  // True if it was the last to end.
  void Drop();
  void Forget();
  void Signal();

  const int num_parts_;
  std::function<void(int)> run_;  // All are let go at the end: they hold what they work on.
  std::function<void()> finish_;
  std::function<void()> drop_;
  std::shared_ptr<const Approach> approach_;  // Or null. A worker may keep it a moment longer.
  std::vector<bool> taken_;                   // Guarded by the mutex of Workers, like the next two.
  int num_taken_ = 0;
  int first_left_ = 0;
  std::atomic<int> parts_left_;
  std::atomic<int64_t> start_ns_{0};
  int64_t end_ns_ = 0;
  std::atomic<bool> done_{false};
  std::mutex mutex_;
  std::condition_variable ended_;
};

}  // namespace wscope
