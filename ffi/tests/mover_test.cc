// The mover: bytes in place, tickets in order, staging counted, waits that end.
#include "mover.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "check.h"
#include "clock.h"

namespace wscope {
namespace {

constexpr int64_t kBlock = 5000;
constexpr int64_t kSoon = 20'000'000'000;

StagedStore MakeStore(const std::shared_ptr<Pool>& pool, int layer, int first_slot, int count,
                      uint8_t fill) {
  StagedStore store;
  store.block_bytes = kBlock;
  if (count > 0) store.staging = {std::make_unique<uint8_t[]>(kBlock * count), kBlock * count};
  for (int i = 0; i < count; ++i) {
    std::memset(store.staging.bytes.get() + i * kBlock, fill + i, kBlock);
    store.destinations.push_back({pool, layer, first_slot + i});
  }
  return store;
}

void TestTicketsInOrder() {
  const auto pool = std::make_shared<Pool>(2, 40, kBlock);
  pool->Commit(40);
  Mover mover;
  mover.set_delay_ms(1);
  CHECK(mover.completed() == 0);
  for (int i = 0; i < 20; ++i) {
    // Every fourth has no blocks; it has a ticket all the same.
    mover.Enqueue(MakeStore(pool, i % 2, i, i % 4 == 3 ? 0 : 1, uint8_t(i)));
  }
  CHECK(mover.staged_layers() > 0 && mover.staged_bytes() > 0);
  for (int ticket = 1; ticket <= 20; ++ticket) {
    CHECK(mover.WaitCompleted(ticket, NowNs() + kSoon));
    CHECK(mover.completed() >= ticket);
    const int i = ticket - 1;
    if (i % 4 == 3) continue;
    CHECK(pool->Block(i % 2, i)[0] == i && pool->Block(i % 2, i)[kBlock - 1] == i);
  }
  CHECK(mover.completed() == 20);
  CHECK(mover.staged_layers() == 0 && mover.staged_bytes() == 0);
  CHECK(mover.staged_high_water() == 2);
}

void TestWaits() {
  const auto pool = std::make_shared<Pool>(1, 2, kBlock);
  pool->Commit(2);
  Mover mover;
  mover.set_delay_ms(50);
  CHECK(mover.WaitCompleted(0, NowNs()));
  CHECK(!mover.WaitCompleted(1, NowNs() + 1'000'000));
  mover.Enqueue(MakeStore(pool, 0, 0, 2, 9));
  CHECK(!mover.WaitCompleted(1, NowNs() + 1'000'000));
  CHECK(!mover.Drain(NowNs() + 1'000'000));
  CHECK(mover.Drain(NowNs() + kSoon));
  CHECK(mover.completed() == 1 && pool->Block(0, 1)[0] == 10);
  std::thread waiter([&] { CHECK(!mover.WaitCompleted(5, NowNs() + kSoon)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  mover.Interrupt();
  waiter.join();
  CHECK(mover.WaitCompleted(1, NowNs()) && !mover.WaitCompleted(2, NowNs() + kSoon));
}

// A store under way keeps its pool; a mover that is let go early ends its work by itself.
void TestLetGo() {
  auto pool = std::make_shared<Pool>(1, 2, kBlock);
  pool->Commit(2);
  const std::weak_ptr<Pool> watch = pool;
  {
    Mover mover;
    mover.set_delay_ms(30);
    mover.Enqueue(MakeStore(pool, 0, 0, 2, 1));
    mover.Enqueue(MakeStore(pool, 0, 0, 2, 3));
    pool.reset();
  }
  CHECK(!watch.expired());
  const int64_t deadline = NowNs() + kSoon;
  while (!watch.expired() && NowNs() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK(watch.expired());
}

void TestManyThreads() {
  const auto pool = std::make_shared<Pool>(1, 4, kBlock);
  pool->Commit(4);
  Mover mover;
  std::thread threads[3];
  for (int thread = 0; thread < 3; ++thread) {
    threads[thread] = std::thread([&, thread] {
      for (int i = 0; i < 50; ++i) mover.Enqueue(MakeStore(pool, 0, thread, 1, uint8_t(thread)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(mover.WaitCompleted(150, NowNs() + kSoon));
  for (int slot = 0; slot < 3; ++slot) CHECK(pool->Block(0, slot)[0] == slot);
}

// A buffer comes back for a store of about its size, and is freed when sizes change.
void TestBuffers() {
  const auto pool = std::make_shared<Pool>(1, 4, kBlock);
  pool->Commit(4);
  Mover mover;
  const auto store_with = [&](StagingBuffer buffer) {
    StagedStore store = MakeStore(pool, 0, 0, 0, 0);
    store.destinations.push_back({pool, 0, 0});
    store.staging = std::move(buffer);
    const int64_t ticket = mover.completed() + 1;
    mover.Enqueue(std::move(store));
    CHECK(mover.WaitCompleted(ticket, NowNs() + kSoon));
  };
  StagingBuffer first = mover.TakeBuffer(2 * kBlock);
  CHECK(first.capacity == 2 * kBlock);
  std::memset(first.bytes.get(), 1, 2 * kBlock);
  const uint8_t* const where = first.bytes.get();
  store_with(std::move(first));
  StagingBuffer again = mover.TakeBuffer(kBlock);
  CHECK(again.bytes.get() == where && again.capacity == 2 * kBlock);
  store_with(std::move(again));
  CHECK(mover.TakeBuffer(kBlock / 2).capacity == kBlock / 2);  // Too much to keep for so little.
  CHECK(mover.TakeBuffer(2 * kBlock).capacity == 2 * kBlock);
}

void TestFork() {
  auto* const mover = new Mover;
  const pid_t child = fork();
  if (child == 0) {
    delete mover;  // Must neither hang nor abort.
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  delete mover;
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::TestTicketsInOrder();
  wscope::TestWaits();
  wscope::TestLetGo();
  wscope::TestManyThreads();
  wscope::TestBuffers();
  wscope::TestFork();
}
