#include "fake_cuda_stream.h"

#include <deque>
#include <random>
#include <thread>
#include <utility>

namespace fake_cuda {
namespace {

std::atomic<int> most_us{0};
std::atomic<bool> held{false};
std::atomic<int> pending{0};
thread_local bool in_callback = false;

void Delay() {
  static std::atomic<unsigned> seed{1};
  thread_local std::minstd_rand random(seed.fetch_add(1, std::memory_order_relaxed));
  while (held.load(std::memory_order_relaxed)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const int most = most_us.load(std::memory_order_relaxed);
  // Half of them none at all: what overtakes and what is overtaken changes more often.
  const int us = most > 0 ? static_cast<int>(random() % (2 * most)) - most : 0;
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

}  // namespace

void Point::Reach() {
  const std::lock_guard<std::mutex> lock(mutex_);
  when_ = std::chrono::steady_clock::now();
  reached_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void Point::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return reached(); });
}

struct Line::State {
  const bool delays;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  std::atomic<int> left{0};
  bool leaving = false;

  explicit State(bool with_delays) : delays(with_delays) {}
};

Line::Line(bool delays) : state_(std::make_shared<State>(delays)) {
  std::thread([state = state_] { Run(*state); }).detach();
}

Line::~Line() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->leaving = true;
  state_->changed.notify_all();
}

void Line::Push(std::function<void()> work) {
  if (state_->delays) pending.fetch_add(1, std::memory_order_relaxed);
  state_->left.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->work.push_back(std::move(work));
  state_->changed.notify_all();
}

bool Line::Idle() const { return state_->left.load(std::memory_order_acquire) == 0; }

void Line::Run(State& state) {
  std::unique_lock<std::mutex> lock(state.mutex);
  for (;;) {
    state.changed.wait(lock, [&] { return !state.work.empty() || state.leaving; });
    if (state.work.empty()) return;
    std::function<void()> work = std::move(state.work.front());
    state.work.pop_front();
    lock.unlock();
    if (state.delays) Delay();
    work();
    work = nullptr;
    state.left.fetch_sub(1, std::memory_order_release);
    if (state.delays) pending.fetch_sub(1, std::memory_order_relaxed);
    lock.lock();
  }
}

void RunCallback(void (*function)(void*), void* data) {
  static auto* const callbacks = new Line(false);
  const auto done = std::make_shared<Point>();
  callbacks->Push([=] {
    in_callback = true;
    function(data);
    in_callback = false;
    done->Reach();
  });
  done->Wait();
}

bool InCallback() { return in_callback; }
void SetDelay(int most) { most_us = most; }
void SetHold(bool on) { held = on; }
int Pending() { return pending; }

}  // namespace fake_cuda

void CUevent_st::Set(std::shared_ptr<fake_cuda::Point> point) {
  const std::lock_guard<std::mutex> lock(mutex_);
  point_ = std::move(point);
}

std::shared_ptr<fake_cuda::Point> CUevent_st::Get() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return point_;
}
