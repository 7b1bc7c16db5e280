// Waiting without sleep.
#pragma once

#include <cstdint>

#include "clock.h"

namespace wscope {

// A layer's next job usually comes sooner than a sleeping thread would wake (5 to 75 us).
inline constexpr int64_t kSpinNs = 30'000;

inline void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `ready()` or the time is over. Returns the last answer.
template <typename Ready>
bool Spin(int64_t most_ns, const Ready& ready) {
  const int64_t until = NowNs() + most_ns;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      Pause();
    }
  } while (NowNs() < until);
  return ready();
}

}  // namespace wscope
