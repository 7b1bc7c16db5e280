#include "calibrate.h"

#include <algorithm>
#include <cstring>
#include <functional>
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

// Each behind the milliseconds of an eviction: a neighbour that takes the memory for a moment
// decides nothing.
constexpr int kRuns = 7;
constexpr int64_t kPiece = int64_t{1} << 20;  // Bytes that one part fills or evicts.

// All pieces of some memory, on the workers or without them here.
void InPieces(uint8_t* begin, int64_t bytes, const std::function<void(uint8_t*, int64_t)>& run) {
  const int pieces = static_cast<int>((bytes + kPiece - 1) / kPiece);
  const auto task = std::make_shared<Task>(pieces, [&](int piece) {
    run(begin + piece * kPiece, std::min(kPiece, bytes - piece * kPiece));
  });
  if (Workers::Get().Submit(task)) {
    task->Wait();
  } else {
    task->RunHere();
  }
}

// Numbers of either sign between 0.5 and 1, in float32 and in bfloat16: a processor that multiplies
// the same number over and over takes less power and so has a higher clock than it has in a step.
void Fill(uint8_t* begin, int64_t bytes) {
  InPieces(begin, bytes, [](uint8_t* to, int64_t size) {
    uint64_t bits = 0x9e3779b97f4a7c15;
    for (int64_t i = 0; i + 8 <= size; i += 8) {
      bits ^= bits << 13;
      bits ^= bits >> 7;
      bits ^= bits << 17;
      const uint64_t numbers = (bits & 0x807f807f807f807f) | 0x3f003f003f003f00;
      std::memcpy(to + i, &numbers, sizeof(numbers));
    }
  });
}

// Out of every cache, however large: what is read next comes from memory, as in a long context.
void Evict(uint8_t* begin, int64_t bytes) {
#if defined(__x86_64__)
  InPieces(begin, bytes, [](const uint8_t* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 64) _mm_clflush(from + i);
    _mm_mfence();
  });
#else
  static_cast<void>(begin);
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
  Fill(pool->Block(0, 0), num_blocks * shape.block_bytes());
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
  Fill(from, num_bytes);
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
