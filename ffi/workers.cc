#include "workers.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "clock.h"

namespace wscope {
namespace {

// A layer's next job usually comes sooner than a sleeping thread would wake (5 to 75 us).
constexpr int64_t kSpinNs = 30'000;

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `ready()` or the time is over. Returns the last answer.
template <typename Ready>
bool Spin(const Ready& ready) {
  const int64_t until = NowNs() + kSpinNs;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      Pause();
    }
  } while (NowNs() < until);
  return ready();
}

}  // namespace

Task::Task(int num_parts, std::function<void(int)> run, std::function<void()> finish)
    : num_parts_(num_parts),
      run_(std::move(run)),
      finish_(std::move(finish)),
      parts_left_(num_parts) {}

bool Task::RunPart(int part) {
  int64_t unset = 0;
  start_ns_.compare_exchange_strong(unset, NowNs(), std::memory_order_relaxed);
  run_(part);
  if (parts_left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  if (finish_) finish_();
  end_ns_ = NowNs();
  run_ = nullptr;
  finish_ = nullptr;
  return true;
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
  if (Spin([this] { return done(); })) return;
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [this] { return done(); });
}

bool Task::WaitUntil(int64_t deadline_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto deadline =
      std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline_ns));
  return ended_.wait_until(lock, deadline, [this] { return done(); });
}

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
      threads_.push_back(StartThread("wscope-w" + std::to_string(i), [this] { Loop(); }));
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
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  Join();
  num_workers_.store(0, std::memory_order_release);
}

bool Workers::Submit(std::shared_ptr<Task> task) {
  if (!creator_.IsThisProcess()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopped_ || num_workers() == 0) return false;
  open_tasks_.fetch_add(1);
  tasks_.push_back(std::move(task));
  has_tasks_.store(true, std::memory_order_release);
  if (sleeping_ > 0) wake_.notify_all();
  return true;
}

// Takes a part of the oldest task, after sleeping if there is none. Null: the thread shall end.
std::shared_ptr<Task> Workers::Claim(std::unique_lock<std::mutex>& lock, int* part) {
  if (tasks_.empty()) {
    ++sleeping_;
    wake_.wait(lock, [this] { return !tasks_.empty() || leaving_; });
    --sleeping_;
    if (tasks_.empty()) return nullptr;
  }
  std::shared_ptr<Task> task = tasks_.front();
  *part = task->next_part_++;
  if (task->next_part_ == task->num_parts_) {
    tasks_.pop_front();
    has_tasks_.store(!tasks_.empty(), std::memory_order_release);
  }
  return task;
}

void Workers::Loop() {
  for (;;) {
    Spin([this] { return has_tasks_.load(std::memory_order_acquire); });
    int part = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    const std::shared_ptr<Task> task = Claim(lock, &part);
    lock.unlock();
    if (!task) return;
    if (task->RunPart(part)) {
      open_tasks_.fetch_sub(1);  // First: who has waited for the task may resize the pool.
      task->Signal();
    }
  }
}

}  // namespace wscope
