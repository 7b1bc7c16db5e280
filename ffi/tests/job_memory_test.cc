// Memory that is used again: the right size, the same pages, as much of it as promised.
#include "job_memory.h"

#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"

namespace wscope {
namespace {

// The same place for what fits, from a line on; another thread has another.
void TestThread() {
  uint8_t* const first = ThreadMemory(1000);
  CHECK(first != nullptr && reinterpret_cast<uintptr_t>(first) % 64 == 0);
  std::memset(first, 1, 1000);
  CHECK(ThreadMemory(10) == first && ThreadMemory(1000) == first);
  uint8_t* const larger = ThreadMemory(100'000);
  std::memset(larger, 2, 100'000);
  CHECK(ThreadMemory(1000) == larger);
  std::thread([&] { CHECK(ThreadMemory(1000) != larger); }).join();
}

// The smallest that is large enough; the largest stay; what is empty is nothing.
void TestSpare() {
  SpareBuffers spares;
  spares.Reserve(100);
  SpareBuffers::Buffer small = spares.Take(100);
  SpareBuffers::Buffer middle = spares.Take(200);
  SpareBuffers::Buffer large = spares.Take(300);
  const uint8_t* const at_100 = small.memory.get();
  const uint8_t* const at_200 = middle.memory.get();
  const uint8_t* const at_300 = large.memory.get();
  CHECK(small.bytes == 100 && middle.bytes == 200 && large.bytes == 300);
  spares.Give(std::move(small));
  spares.Give(std::move(large));
  spares.Give(std::move(small));  // NOLINT: empty by now.
  CHECK(at_100 != nullptr && spares.Take(50).memory.get() == at_100);
  spares.Give({std::unique_ptr<uint8_t[]>(new uint8_t[100]), 100});
  spares.Give(std::move(middle));
  CHECK(kMostSpare == 2);
  spares.Reserve(250);
  const SpareBuffers::Buffer second = spares.Take(100);
  const SpareBuffers::Buffer first = spares.Take(100);
  CHECK(second.memory.get() == at_200 && first.memory.get() == at_300);
}

void TestManyThreads() {
  SpareBuffers spares;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&spares, thread] {
      for (int round = 0; round < 500; ++round) {
        const int64_t bytes = 100 + 100 * ((thread + round) % 5);
        SpareBuffers::Buffer buffer = spares.Take(bytes);
        CHECK(buffer.bytes >= bytes);
        std::memset(buffer.memory.get(), thread, static_cast<size_t>(buffer.bytes));
        for (int64_t i = 0; i < buffer.bytes; ++i) CHECK(buffer.memory[i] == thread);
        spares.Give(std::move(buffer));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kCanRefuse = false;  // Sanitizers end the process instead.
#else
constexpr bool kCanRefuse = true;
#endif

void TestTooMuch() {
  if (!kCanRefuse) return;
  SpareBuffers spares;
  bool refused = false;
  try {
    spares.Reserve(int64_t{1} << 60);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  CHECK(refused && spares.Take(int64_t{1} << 60).memory == nullptr);
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::TestThread();
  wscope::TestSpare();
  wscope::TestManyThreads();
  wscope::TestTooMuch();
}
