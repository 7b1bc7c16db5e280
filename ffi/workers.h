// The one pool of worker threads of the process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "task.h"
#include "thread.h"

namespace wscope {

// What a device writes and a worker looks at: 0 and then, once, another number.
using Flag = std::atomic<uint32_t>;
static_assert(sizeof(Flag) == sizeof(uint32_t) && Flag::is_always_lock_free);

// Runs tasks first in, first out. A worker that finds nothing spins for a moment and then sleeps;
// while tasks are armed one of those looks at their flags instead, and they approach the first.
class Workers {
 public:
  static Workers& Get();

  // Makes the pool `count` threads large; does nothing if it is. If the system refuses some of the
  // threads the pool is smaller, see num_workers(). Throws std::invalid_argument if count < 1,
  // std::runtime_error if tasks are open, if not one thread could be started, after Stop(), or in a
  // forked child.
  void Start(int count);

  int num_workers() const { return num_workers_.load(std::memory_order_acquire); }

  // False if there are no workers (not started, stopped, or in a forked child): the task is not
  // run.
  bool Submit(std::shared_ptr<Task> task);

  // As Submit, but the task's turn comes when the flag is not 0; of those whose flags are up the
  // first armed goes first. The flag must stay until the task is done.
  bool Arm(std::shared_ptr<Task> task, const Flag* flag);
  // Drops an armed task, if its turn has not come. Does nothing to any other.
  void Disarm(const std::shared_ptr<Task>& task);

  // Lets the workers finish what was submitted, drops what is armed, and ends them for good. For
  // the end of the process.
  void Stop();

 private:
  struct Armed {
    std::shared_ptr<Task> task;
    const Flag* flag;
  };

  // A worker: its number, and how far it has approached the task that it waits for.
  struct Self {
    explicit Self(int number) : number(number) {}

    const int number;
    std::weak_ptr<const Task::Approach> approached;  // Compared only.
    int step = 0;                                    // The next one; below 0, there is none.

    // Goes on with `next`, or begins with it; false if it has come as near as it can.
    bool Approaches(const std::shared_ptr<const Task::Approach>& next) {
      if (approached.owner_before(next) || next.owner_before(approached)) step = 0;
      approached = next;
      return step >= 0;
    }
    bool Step(const Task::Approach& next) {
      step = next(number, step) ? step + 1 : -1;
      return step >= 0;
    }
  };

  Workers() = default;
  void Loop(int number);
  void Idle(Self* self);
  void Watch(std::unique_lock<std::mutex>& lock, Self* self);
  void Look(uint64_t change, const std::shared_ptr<const Task::Approach>& next, Self* self) const;
  std::shared_ptr<const Task::Approach> NextApproach() const;
  bool TakeReady(std::deque<Armed>* armed);
  void ChangeArmed();
  void AwaitLookingAway(std::unique_lock<std::mutex>& lock);
  void Drop(Task& task);
  std::shared_ptr<Task> Claim(std::unique_lock<std::mutex>& lock, Self* self, int* part);
  void Join();

  const Creator creator_;
  std::mutex resize_mutex_;           // One Start or Stop at a time; taken before mutex_.
  std::vector<std::thread> threads_;  // Guarded by resize_mutex_.
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Task>> tasks_;  // With parts to take. Guarded by mutex_.
  std::deque<Armed> armed_;                  // Oldest first. Guarded by mutex_.
  uint64_t watched_change_ = 0;              // Of what is looked at. Guarded by mutex_.
  const Task* first_armed_ = nullptr;        // Compared only. Guarded by mutex_.
  std::condition_variable looked_away_;
  std::vector<const Flag*> watched_;    // Of the worker that watches alone.
  int sleeping_ = 0;                    // Guarded by mutex_.
  bool leaving_ = false;                // Guarded by mutex_.
  bool stopped_ = false;                // Guarded by mutex_.
  std::atomic<bool> has_tasks_{false};  // What a spinning worker looks at.
  std::atomic<size_t> num_armed_{0};    // The same of armed_; written under mutex_,
  std::atomic<uint64_t> change_{0};     // as its number of changes,
  std::atomic<uint64_t> turn_{0};       // that of the changes of its first task
  std::atomic<bool> watching_{false};   // and that a worker looks at flags without the mutex.
  std::atomic<int> open_tasks_{0};      // Submitted or armed, and not done.
  std::atomic<int> num_workers_{0};
};

}  // namespace wscope
