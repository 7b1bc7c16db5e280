// Copies at a rate: when the next one may begin.
#include "link_copies.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>

#include "check.h"
#include "clock.h"

namespace wscope {
namespace {

constexpr int64_t kStart = 5000;

// A byte takes a nanosecond.
Pace Paced() { return Pace(1e9, kStart); }

bool DueAt(const Pace& pace, int64_t ns) {
  return pace.Due(kStart + ns) && !pace.Due(kStart + ns - 1);
}

void TestOnTime() {
  Pace pace = Paced();
  CHECK(DueAt(pace, 0));
  pace.Begin(100, kStart);
  CHECK(DueAt(pace, 100));
  pace.Begin(50, kStart + 100);
  CHECK(DueAt(pace, 150));
  // A little late, as threads wake up: the schedule stays.
  pace.Begin(100, kStart + 160);
  CHECK(DueAt(pace, 250));
}

// After a slow stretch one copy follows at once; the others keep their distance.
void TestLate() {
  Pace pace = Paced();
  pace.Begin(100, kStart);
  pace.Begin(100, kStart + 10'000);
  CHECK(DueAt(pace, 10'000));
  pace.Begin(100, kStart + 10'010);
  CHECK(DueAt(pace, 10'100));
  pace.Begin(100, kStart + 10'100);
  CHECK(DueAt(pace, 10'200));
}

void TestUnpaced() {
  Pace pace(std::nullopt, kStart);
  pace.Begin(std::numeric_limits<int64_t>::max(), kStart);
  CHECK(DueAt(pace, 0));
}

void TestWait() {
  const int64_t start = NowNs();
  Pace pace(1e9, start);
  CHECK(pace.Wait(start + 60'000'000'000));
  pace.Begin(2'000'000, start);
  CHECK(!pace.Wait(start + 1'000'000) && NowNs() >= start + 1'000'000);
  CHECK(pace.Wait(start + 60'000'000'000) && NowNs() >= start + 2'000'000);
  // So slow that no number tells when: the end comes first.
  Pace slow(std::numeric_limits<double>::denorm_min(), start);
  slow.Begin(1, start);
  CHECK(!slow.Wait(NowNs() + 1'000'000));
}

// The host's memory keeps to a rate, and what it gives is told even if only one copy fits in.
void TestHost() {
  Pool pool(1, 2, 4096);
  pool.Commit(2);
  const auto link = MakeLink(std::nullopt, 4096);
  const double paced = link->Run(pool, 1e6, NowNs() + 200'000'000);
  CHECK(paced > 0 && paced < 2e6);
  CHECK(link->Run(pool, std::nullopt, NowNs() + 20'000'000) > 2 * paced);
  CHECK(link->Run(pool, 1e-3, NowNs() + 100'000'000) > 0);
  CHECK(link->Run(pool, 1e6, NowNs() - 1) == 0);
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::TestOnTime();
  wscope::TestLate();
  wscope::TestUnpaced();
  wscope::TestWait();
  wscope::TestHost();
}
