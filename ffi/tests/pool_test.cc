// Host memory: where blocks lie, what a commit does, what is refused.
#include "pool.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "workers.h"

namespace wscope {
namespace {

bool IsZero(const uint8_t* begin, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    if (begin[i] != 0) return false;
  }
  return true;
}

// Every block has its own bytes, is zero at first and keeps what is written while the pool grows.
void TestBlocks(int num_layers, int max_slots, int64_t block_bytes) {
  Pool pool(num_layers, max_slots, block_bytes);
  CHECK(pool.committed() == 0);
  int written = 0;
  for (const int slots : {1, 2, max_slots / 2, max_slots}) {
    pool.Commit(slots);
    CHECK(pool.committed() >= slots);
    for (int slot = written; slot < slots; ++slot) {
      for (int layer = 0; layer < num_layers; ++layer) {
        CHECK(IsZero(pool.Block(layer, slot), block_bytes));
        std::memset(pool.Block(layer, slot), 1 + (layer * max_slots + slot) % 255, block_bytes);
      }
    }
    written = slots;
  }
  for (int layer = 0; layer < num_layers; ++layer) {
    for (int slot = 0; slot < max_slots; ++slot) {
      const uint8_t* const block = pool.Block(layer, slot);
      const uint8_t want = 1 + (layer * max_slots + slot) % 255;
      for (int64_t i = 0; i < block_bytes; ++i) CHECK(block[i] == want);
      if (slot > 0) CHECK(block == pool.Block(layer, slot - 1) + block_bytes);
    }
  }
  pool.Commit(1);  // Never shrinks.
  CHECK(pool.committed() == max_slots);
}

void TestAlignment() {
  Pool pool(2, 8, int64_t{1} << 20);
  for (int layer = 0; layer < 2; ++layer) {
    CHECK(reinterpret_cast<uintptr_t>(pool.Block(layer, 0)) % (2 << 20) == 0);
  }
}

void TestRefusals() {
  CHECK(Throws<std::invalid_argument>([] { Pool(0, 1, 1); }, "num_layers"));
  CHECK(Throws<std::invalid_argument>([] { Pool(1, -1, 1); }, "max_slots"));
  CHECK(Throws<std::invalid_argument>([] { Pool(1, 1, 0); }, "block_bytes"));
  CHECK(Throws<std::invalid_argument>([] { Pool(INT_MAX, INT_MAX, INT_MAX); }, "overflow"));
  CHECK(Throws<std::invalid_argument>([] { Pool(1, 2, INT64_MAX / 2); }, "overflow"));
  CHECK(Throws<OutOfMemory>([] { Pool(1, 1 << 20, int64_t{1} << 40); }, "address space"));
  Pool pool(1, 4, 64);
  CHECK(Throws<std::invalid_argument>([&] { pool.Commit(5); }, "num_slots is 5"));
  CHECK(Throws<std::invalid_argument>([&] { pool.Commit(-1); }, "num_slots is -1"));
}

// Reserving takes no memory, so a pool may be larger than the machine; committing it is refused.
void TestMoreThanTheMachine() {
  const int64_t machine = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  const int max_slots = static_cast<int>(machine >> 20);  // Twice the memory.
  Pool pool(2, max_slots, int64_t{1} << 20);
  pool.Commit(2);
  CHECK(Throws<OutOfMemory>([&] { pool.Commit(max_slots); }, "lower the host memory budget"));
  CHECK(pool.committed() == 2);
  pool.Commit(3);
  CHECK(pool.committed() == 3);
}

void TestGrowWhileRead() {
  Pool pool(2, 64, 100'000);
  pool.Commit(1);
  std::thread grower([&] {
    for (int slots = 2; slots <= 64; slots += 3) pool.Commit(slots);
  });
  for (int round = 0; round < 200; ++round) {
    const int slots = pool.committed();
    std::memset(pool.Block(1, slots - 1), 1, pool.block_bytes());
  }
  grower.join();
}

void TestFork() {
  Pool pool(1, 4, 4096);
  pool.Commit(2);
  pool.Block(0, 1)[5] = 17;
  const pid_t child = fork();
  if (child == 0) {
    const bool good =
        pool.Block(0, 1)[5] == 17 && Throws<std::runtime_error>([&] { pool.Commit(4); }, "fork");
    _exit(good ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

void TestAll() {
  TestBlocks(1, 4, 1);
  TestBlocks(3, 9, 100);
  TestBlocks(2, 5, 1'000'000);
  TestBlocks(3, 64, 70'000);
  TestAlignment();
  TestRefusals();
  TestMoreThanTheMachine();
  TestGrowWhileRead();
  TestFork();
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::TestAll();  // The caller touches the pages.
  wscope::Workers::Get().Start(2);
  wscope::TestAll();  // The workers do.
  wscope::Workers::Get().Stop();
}
