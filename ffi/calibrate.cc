#include "calibrate.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "clock.h"
#include "host_job.h"
#include "pool.h"
#include "size_math.h"
#include "workers.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace wscope {
namespace {

// Some 15 ms apart: a neighbour that takes the memory for a moment decides nothing.
constexpr int kRuns = 7;
constexpr uint8_t kFill = 0x3c;  // Makes a small normal number in float32 and in bfloat16.

// Out of every cache, however large: what is read next comes from memory, as in a long context.
void Evict(const uint8_t* from, int64_t bytes) {
#if defined(__x86_64__)
  for (int64_t i = 0; i < bytes; i += 64) _mm_clflush(from + i);
  _mm_mfence();
#else
  static_cast<void>(from);
  static_cast<void>(bytes);
#endif
}

template <typename Run>
int64_t MedianNs(const Run& run) {
  run();
  std::vector<int64_t> times;
  for (int i = 0; i < kRuns; ++i) times.push_back(run());
  std::sort(times.begin(), times.end());
  return times[kRuns / 2];
}

}  // namespace

int64_t TimeAttention(const AttentionShape& shape, int num_blocks) {
  const std::string wrong = CheckShape(shape);
  if (!wrong.empty()) throw std::invalid_argument("time_attention: " + wrong);
  if (num_blocks < 1) {
    throw std::invalid_argument("time_attention: num_blocks is " + std::to_string(num_blocks) +
                                ", must be at least 1");
  }
  const auto pool = std::make_shared<Pool>(1, num_blocks, shape.block_bytes());
  pool->Commit(num_blocks);
  std::memset(pool->Block(0, 0), kFill, num_blocks * shape.block_bytes());
  std::vector<int32_t> table(num_blocks);
  std::iota(table.begin(), table.end(), 0);
  const int32_t row_ptr[] = {0, num_blocks};
  const auto rows = std::make_shared<RowBlocks>(pool.get(), 1, row_ptr, table.data());
  return MedianNs([&] {
    const auto job =
        std::make_shared<HostJob>(shape, pool, 0, rows, std::max(1, Workers::Get().num_workers()));
    job->BindCopy(std::vector<float>(job->q_size(), 0.01f).data(), Storage::kFloat32);
    Evict(pool->Block(0, 0), num_blocks * shape.block_bytes());
    const std::shared_ptr<Task> task = MakeTask(job);
    if (!Workers::Get().Submit(task)) {
      throw std::runtime_error("time_attention: there are no workers; call start_workers first");
    }
    task->Wait();
    return task->end_ns() - task->start_ns();
  });
}

int64_t TimeCopy(int64_t num_bytes) {
  if (num_bytes < 1) {
    throw std::invalid_argument("time_copy: num_bytes is " + std::to_string(num_bytes) +
                                ", must be at least 1");
  }
  Pool pool(1, 2, num_bytes);
  pool.Commit(2);
  uint8_t* const from = pool.Block(0, 0);
  uint8_t* const to = pool.Block(0, 1);
  std::memset(from, kFill, num_bytes);
  return MedianNs([&] {
    Evict(from, num_bytes);
    Evict(to, num_bytes);
    const int64_t start = NowNs();
    std::memcpy(to, from, num_bytes);
    // Or the compiler may see that nobody reads the copy.
    asm volatile("" : : "r"(to) : "memory");
    return NowNs() - start;
  });
}

}  // namespace wscope
