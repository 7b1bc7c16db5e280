// Streams and events of the fake driver.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

namespace fake_cuda {

// A place in a stream. One lock each, as few as the real driver promises: a common one would hide
// races from the thread sanitizer.
class Point {
 public:
  void Reach();
  void Wait();
  bool reached() const { return reached_.load(std::memory_order_acquire); }
  std::chrono::steady_clock::time_point when() const { return when_; }  // Once reached.

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::steady_clock::time_point when_;
  std::atomic<bool> reached_{false};
};

// A thread that does one thing after the other. It ends when it has nothing left and is let go.
class Line {
 public:
  explicit Line(bool delays);
  ~Line();
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  void Push(std::function<void()> work);
  bool Idle() const;

 private:
  struct State;
  static void Run(State& state);

  const std::shared_ptr<State> state_;
};

// Runs `function` on the one thread of all callbacks; returns when it has.
void RunCallback(void (*function)(void*), void* data);
bool InCallback();

// The streams, or the events, that are alive. What nobody destroys stays reachable, so that only
// their number tells.
template <typename T>
class Alive {
 public:
  T* Make() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return *all_.insert(new T).first;
  }
  // False if there is no such thing.
  bool Destroy(T* thing) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (all_.erase(thing) == 0) return false;
    delete thing;
    return true;
  }
  int count() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(all_.size());
  }

 private:
  mutable std::mutex mutex_;
  std::set<T*> all_;
};

void SetDelay(int most_us);
void SetHold(bool on);
int Pending();

}  // namespace fake_cuda

struct CUstream_st {
  fake_cuda::Line line{true};
};

struct CUevent_st {
  void Set(std::shared_ptr<fake_cuda::Point> point);
  std::shared_ptr<fake_cuda::Point> Get() const;  // Null: never recorded.

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<fake_cuda::Point> point_;
};
