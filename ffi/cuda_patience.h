// Waits for a device that may hang, and what becomes of memory if it does.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "clock.h"
#include "cuda_driver.h"

namespace wscope {

// Waits for one thing after the other by polling, since no wait of the driver has a deadline.
class Patience {
 public:
  explicit Patience(int64_t deadline_ns) : deadline_ns_(deadline_ns) {}

  // False if the deadline passed first.
  template <typename Query>
  bool Await(const Query& query) {
    for (;;) {
      const cuda::Result result = query();
      if (result == 0) return true;
      if (result != cuda::kNotReady && ++failures_ >= kFailingQueries) return true;
      if (NowNs() > deadline_ns_) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  static constexpr int kFailingQueries = 50;  // Then the context is lost, and nothing runs in it.

  const int64_t deadline_ns_;
  int failures_ = 0;
};

// For what the device may still touch, since it hangs beyond every deadline.
inline void KeepForever(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::deque<std::shared_ptr<void>>;
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace wscope
