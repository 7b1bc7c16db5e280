#include "workers.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "spin.h"

namespace wscope {
namespace {

// A device is under way to the next job: it comes, after a layer's time at most.
constexpr int64_t kArmedSpinNs = 200'000;
// How often a worker looks at flags before it lets other threads of its core go first each time.
constexpr int kEagerLooks = 10'000;
constexpr int kPatientLooks = 1'000'000;  // And before it sleeps in between.
constexpr int64_t kLockSpinNs = 20'000;

// All workers come for a part at once when a task does. None holds the mutex for long, and who
// slept for it would come late.
std::unique_lock<std::mutex> Acquire(std::mutex& mutex) {
  std::unique_lock<std::mutex> lock(mutex, std::defer_lock);
  if (!Spin(kLockSpinNs, [&] { return lock.try_lock(); })) lock.lock();
  return lock;
}

}  // namespace

Workers& Workers::Get() {
  static auto* const workers = new Workers;  // Never destroyed: see Stop.
  return *workers;
}

void Workers::Start(int count) {
  if (!creator_.IsThisProcess()) throw std::runtime_error(Creator::ForkText("start_workers"));
  if (count < 1) {
    throw std::invalid_argument("start_workers: n is " + std::to_string(count) +
                                ", must be at least 1");
  }
  const std::lock_guard<std::mutex> resize(resize_mutex_);
  if (num_workers() == count) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) throw std::runtime_error("start_workers: the process is ending");
    if (const int open = open_tasks_.load(); open > 0) {
      throw std::runtime_error("start_workers: cannot change the number of workers while " +
                               std::to_string(open) + " job(s) are open; wait for the step to end");
    }
  }
  Join();
  std::string refusal;
  threads_.reserve(count);
  for (int i = 0; i < count && refusal.empty(); ++i) {
    try {
      threads_.push_back(StartThread("wscope-w" + std::to_string(i), [this, i] { Loop(i); }));
    } catch (const std::system_error& error) {
      refusal = error.what();
    }
  }
  num_workers_.store(static_cast<int>(threads_.size()), std::memory_order_release);
  if (threads_.empty()) {
    throw std::runtime_error("start_workers: the system refuses to start a thread (" + refusal +
                             "); raise the limit on processes (`ulimit -u`)");
  }
}

// Ends all threads once nothing is left to take. With resize_mutex_ held.
void Workers::Join() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    leaving_ = true;
    wake_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  const std::lock_guard<std::mutex> lock(mutex_);
  leaving_ = false;
}

void Workers::Stop() {
  if (!creator_.IsThisProcess()) return;
  const std::lock_guard<std::mutex> resize(resize_mutex_);
  std::deque<Armed> armed;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    stopped_ = true;
    armed.swap(armed_);
    ChangeArmed();
    AwaitLookingAway(lock);
    TakeReady(&armed);
  }
  for (const Armed& left : armed) Drop(*left.task);
  Join();
  num_workers_.store(0, std::memory_order_release);
}

bool Workers::Submit(std::shared_ptr<Task> task) {
  if (!creator_.IsThisProcess()) return false;
  const std::unique_lock<std::mutex> lock = Acquire(mutex_);
  if (stopped_ || num_workers() == 0) return false;
  tasks_.push_back(std::move(task));
  open_tasks_.fetch_add(1);
  has_tasks_.store(true, std::memory_order_release);
  if (sleeping_ > 0) wake_.notify_all();
  return true;
}

bool Workers::Arm(std::shared_ptr<Task> task, const Flag* flag) {
  if (!creator_.IsThisProcess()) return false;
  const std::unique_lock<std::mutex> lock = Acquire(mutex_);
  if (stopped_ || num_workers() == 0) return false;
  armed_.push_back({std::move(task), flag});
  open_tasks_.fetch_add(1);
  ChangeArmed();
  if (!watching_ && sleeping_ > 0) wake_.notify_one();
  return true;
}

void Workers::Disarm(const std::shared_ptr<Task>& task) {
  if (!creator_.IsThisProcess()) return;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = std::find_if(armed_.begin(), armed_.end(),
                                    [&](const Armed& armed) { return armed.task == task; });
    if (found == armed_.end()) return;
    armed_.erase(found);
    ChangeArmed();
    AwaitLookingAway(lock);
    if (leaving_) wake_.notify_all();
  }
  Drop(*task);
}

void Workers::Drop(Task& task) {
  open_tasks_.fetch_sub(1);
  task.Drop();
}

// With mutex_ held, like the next four.
void Workers::ChangeArmed() {
  num_armed_.store(armed_.size(), std::memory_order_release);
  change_.fetch_add(1, std::memory_order_release);
  const Task* const first = armed_.empty() ? nullptr : armed_.front().task.get();
  if (first != first_armed_) turn_.fetch_add(1, std::memory_order_release);
  first_armed_ = first;
}

// Returns when nobody looks at a flag that is not in armed_ any more.
void Workers::AwaitLookingAway(std::unique_lock<std::mutex>& lock) {
  const uint64_t change = change_;
  looked_away_.wait(lock, [&] { return !watching_ || watched_change_ >= change; });
}

// Submits those whose flags are up. True if there is one.
bool Workers::TakeReady(std::deque<Armed>* armed) {
  const size_t before = armed->size();
  for (Armed& one : *armed) {
    if (one.flag->load(std::memory_order_acquire) != 0) tasks_.push_back(std::move(one.task));
  }
  armed->erase(std::remove_if(armed->begin(), armed->end(),
                              [](const Armed& one) { return one.task == nullptr; }),
               armed->end());
  if (armed->size() == before) return false;
  has_tasks_.store(true, std::memory_order_release);
  if (sleeping_ > 0) wake_.notify_all();
  return true;
}

// Looks at the flags of all armed tasks until there is something to do. Who spins sees one watcher
// all the time, also when the flags change.
void Workers::Watch(std::unique_lock<std::mutex>& lock, Self* self) {
  watching_ = true;
  do {
    watched_.clear();
    for (const Armed& armed : armed_) watched_.push_back(armed.flag);
    const uint64_t change = watched_change_ = change_;
    std::shared_ptr<const Task::Approach> next = NextApproach();
    looked_away_.notify_all();
    lock.unlock();
    Look(change, next, self);
    next = nullptr;  // It may be the last to hold a job: without the lock.
    lock = Acquire(mutex_);
    if (TakeReady(&armed_)) ChangeArmed();
  } while (tasks_.empty() && !armed_.empty());
  watching_ = false;
  looked_away_.notify_all();
}

// Of the task whose turn is next; null if it has none.
std::shared_ptr<const Task::Approach> Workers::NextApproach() const {
  return armed_.empty() ? nullptr : armed_.front().task->approach_;
}

// Without the mutex: until a flag is up, a task is there, or other flags are. Approaches `next`
// meanwhile.
void Workers::Look(uint64_t change, const std::shared_ptr<const Task::Approach>& next,
                   Self* self) const {
  bool approaches = next && self->Approaches(next);
  for (int looks = 0;; ++looks) {
    for (const Flag* flag : watched_) {
      if (flag->load(std::memory_order_acquire) != 0) return;
    }
    if (has_tasks_.load(std::memory_order_acquire)) return;
    if (change_.load(std::memory_order_acquire) != change) return;
    if (approaches) {
      approaches = self->Step(*next);
    } else if (looks < kEagerLooks) {
      Pause();
    } else if (looks < kPatientLooks) {
      std::this_thread::yield();
    } else {  // The device is busy with something long, or lost.
      looks = kPatientLooks;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

// Takes a part of the oldest task, after watching or sleeping if there is none. Null: the thread
// shall end.
std::shared_ptr<Task> Workers::Claim(std::unique_lock<std::mutex>& lock, Self* self, int* part) {
  while (tasks_.empty()) {
    if (!armed_.empty() && !watching_) {
      Watch(lock, self);
      continue;
    }
    if (leaving_ && armed_.empty()) return nullptr;
    ++sleeping_;
    wake_.wait(lock);
    --sleeping_;
  }
  std::shared_ptr<Task> task = tasks_.front();
  *part = task->Take(self->number);
  if (task->AllTaken()) {
    tasks_.pop_front();
    has_tasks_.store(!tasks_.empty(), std::memory_order_release);
  }
  // Somebody else shall watch meanwhile.
  if (!armed_.empty() && !watching_ && sleeping_ > 0) wake_.notify_one();
  return task;
}

// Until there is something to do, or for a moment. Approaches the task whose turn is next.
void Workers::Idle(Self* self) {
  const auto is_work = [this] {
    return has_tasks_.load(std::memory_order_acquire) ||
           (num_armed_.load(std::memory_order_acquire) > 0 && !watching_);
  };
  uint64_t turn = 0;
  do {
    if (is_work()) return;
    std::shared_ptr<const Task::Approach> next;
    {
      const std::unique_lock<std::mutex> lock = Acquire(mutex_);
      turn = turn_;
      next = NextApproach();
    }
    bool approaches = next && self->Approaches(next);
    while (approaches && !is_work() && turn_ == turn) approaches = self->Step(*next);
    next = nullptr;
    Spin(num_armed_ > 0 ? kArmedSpinNs : kSpinNs, [&] { return is_work() || turn_ != turn; });
  } while (turn_ != turn);
}

void Workers::Loop(int number) {
  Self self(number);
  for (;;) {
    Idle(&self);
    int part = 0;
    std::unique_lock<std::mutex> lock = Acquire(mutex_);
    const std::shared_ptr<Task> task = Claim(lock, &self, &part);
    lock.unlock();
    if (!task) return;
    if (task->RunPart(part)) {
      open_tasks_.fetch_sub(1);  // First: who has waited for the task may resize the pool.
      task->Signal();
    }
  }
}

}  // namespace wscope
