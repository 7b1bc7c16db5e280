// Pools whose pages are pinned for a device.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.h"
#include "fake_device.h"
#include "measure.h"
#include "pool.h"
#include "workers.h"

namespace wscope {
namespace {

// Keeps what is locked, and refuses on request.
class Book : public PageLock {
 public:
  std::string Lock(void* begin, size_t bytes) override {
    const auto first = reinterpret_cast<uintptr_t>(begin);
    CHECK(bytes > 0 && first % 4096 == 0 && bytes % 4096 == 0);
    const auto after = locked.lower_bound(first);
    CHECK(after == locked.end() || after->first >= first + bytes);
    CHECK(after == locked.begin() || std::prev(after)->first + std::prev(after)->second <= first);
    if (refuse_after-- == 0) return "enough";
    locked[first] = bytes;
    return {};
  }
  void Unlock(void* begin) override {
    CHECK(locked.erase(reinterpret_cast<uintptr_t>(begin)) == 1);
  }

  bool Has(const uint8_t* begin, int64_t bytes) const {
    const auto first = reinterpret_cast<uintptr_t>(begin);
    const auto after = locked.upper_bound(first);
    if (after == locked.begin()) return false;
    const auto& [from, length] = *std::prev(after);
    return first + bytes <= from + length;
  }

  std::map<uintptr_t, size_t> locked;
  int refuse_after = -1;
};

// All that is committed is pinned, and PinnedRun knows where one piece ends.
void TestRanges(int num_layers, int max_slots, int64_t block_bytes) {
  const auto book = std::make_shared<Book>();
  {
    Pool pool(num_layers, max_slots, block_bytes, book);
    CHECK(pool.is_pinned() && book->locked.empty());
    for (int slots = 1; slots <= max_slots; slots += 1 + slots / 3) {
      pool.Commit(slots);
      for (int layer = 0; layer < num_layers; ++layer) {
        const int64_t all = slots * block_bytes;
        for (int64_t at = 0; at < all;) {
          const int64_t run = pool.PinnedRun(at, all - at);
          CHECK(run > 0 && book->Has(pool.Block(layer, 0) + at, run));
          CHECK(at + run == all || !book->Has(pool.Block(layer, 0) + at, run + 1));
          at += run;
        }
      }
    }
    CHECK(book->locked.size() % num_layers == 0);
  }
  CHECK(book->locked.empty());
}

// A refusal at any layer leaves the pool as it was; later it may grow.
void TestRefused() {
  const auto book = std::make_shared<Book>();
  {
    Pool pool(3, 8, 5000, book);
    pool.Commit(2);
    for (int layer = 0; layer < 3; ++layer) {
      book->refuse_after = layer;
      CHECK(Throws<OutOfMemory>([&] { pool.Commit(6); }, "enough"));
      CHECK(pool.committed() == 2 && book->locked.size() == 3);
      CHECK(pool.PinnedRun(0, 10'000) == 10'000);
    }
    book->refuse_after = -1;
    pool.Commit(6);
    CHECK(pool.committed() == 6 && book->locked.size() == 6);
    pool.Block(2, 5)[4999] = 1;
  }
  CHECK(book->locked.empty());
}

// The same with the driver's functions, on a thread without a context.
void TestDriver() {
  const FakeCudaLive before = Fake::Get().live();
  const auto registered = [&] { return Fake::Get().live().registered - before.registered; };
  {
    Pool pool(2, 8, 5000, cuda::MakePageLock(0));
    pool.Commit(1);
    pool.Commit(2);
    CHECK(registered() == 4);
    Fake::Get().fail_at(5, 2, false);  // Of each layer: get, set, register, set.
    CHECK(Throws<OutOfMemory>([&] { pool.Commit(8); }, "out of memory"));
    CHECK(pool.committed() == 2 && registered() == 4);
    pool.Commit(8);
    CHECK(registered() == 6);
  }
  CHECK(Fake::Get().live() == before);
}

// Each call fails once: told by an exception, and nothing is left.
void TestFailures() {
  const FakeCudaLive before = Fake::Get().live();
  CHECK(cuda::TimeLoad(0, 1 << 20) > 0);
  CHECK(Throws<std::runtime_error>([] { cuda::TimeLoad(1, 4096); }, "invalid device ordinal"));
  CHECK(Throws<std::runtime_error>([] { cuda::MakePageLock(1); }, "invalid device ordinal"));
  CHECK(Fake::Get().live() == before);
  Fake::Get().delay_us(500);
  bool failed = true;
  int refused = 0;
  for (int n = 1; failed; ++n) {
    Fake::Get().fail_at(n, 999, false);
    try {
      cuda::TimeLoad(0, 4096);
    } catch (const std::runtime_error&) {
      ++refused;
    }
    failed = Fake::Get().failed() != nullptr;
  }
  CHECK(refused > 15);
  Fake::Get().fail_at(0, 0, false);
  CHECK(BecomesLive(before));
}

// The link copies a pool that grew in pieces, alone and while the workers read another one; each
// call fails once: told by an exception, and nothing is left.
void TestStreams() {
  constexpr int64_t kLong = 200'000'000;  // The workers take every core of a small machine.
  Fake::Get().delay_us(0);
  const FakeCudaLive before = Fake::Get().live();
  {
    Pool read(2, 4, 5000);
    read.Commit(4);
    Pool link(2, 8, 5000, cuda::MakePageLock(0));
    for (const int slots : {1, 2, 7}) link.Commit(slots);
    const FakeCudaLive pools = Fake::Get().live();
    const auto measure = [&](const Pool* pool, int64_t duration_ns) {
      return MeasureStreams(pool, kPortableKernel, &link, 0, 12'000, duration_ns, std::nullopt);
    };
    const Rates alone = measure(nullptr, kLong);
    CHECK(alone.link > 0 && alone.read == 0);
    const Rates both = measure(&read, kLong);
    CHECK(both.link > 0 && both.read > 0);
    int refused = 0;
    for (int n = 1; n <= 40; ++n) {
      Fake::Get().fail_at(n, 999, false);
      try {
        measure(&read, 3'000'000);
      } catch (const std::runtime_error&) {
        ++refused;
      }
    }
    CHECK(refused > 15);
    Fake::Get().fail_at(0, 0, false);
    CHECK(BecomesLive(pools));
  }
  CHECK(BecomesLive(before));
}

// At a rate no copy is begun while one is under way, however late that is; nor is it forgotten when
// it ends after the time that was given.
void TestPaced() {
  Pool link(1, 4, 4096, cuda::MakePageLock(0));
  link.Commit(4);
  const auto measure = [&](double rate, int64_t duration_ns) {
    return MeasureStreams(nullptr, kPortableKernel, &link, 0, 4096, duration_ns, rate).link;
  };
  Fake::Get().hold(1);
  double held = 0;
  std::thread thread([&] { held = measure(1e12, 50'000'000); });
  // Pending: the event that begins, a copy, the event that it ended, and in the end the wait.
  const auto pending = [] { return Fake::Get().live().pending; };
  for (int ms = 0; pending() < 4 && ms < 10'000; ++ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(pending() == 4);
  Fake::Get().hold(0);
  thread.join();
  CHECK(held > 0);
  Fake::Get().delay_us(500);
  const double paced = measure(1e6, 200'000'000);
  CHECK(paced > 0 && paced < 2e6);
  Fake::Get().delay_us(0);
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::Workers::Get().Start(2);
  wscope::TestRanges(1, 4, 1);
  wscope::TestRanges(3, 40, 5000);
  wscope::TestRanges(2, 9, 1'000'000);
  wscope::TestRefused();
  wscope::TestDriver();
  wscope::TestFailures();
  wscope::TestStreams();
  wscope::TestPaced();
  wscope::Workers::Get().Stop();
}
