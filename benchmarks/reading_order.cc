// What does reading cost in the order of the grouped kernel, whose heads lie in runs, a block
// apart?
//
// One thread reads a GiB of huge pages, run by run: one behind the other, or as a kv head's blocks
// lie in 16 blocks of a row, with software prefetches so many bytes ahead along the same order.
// GB/s of CPU time, the median of 7 readings in turns. No arithmetic, no states: what is lost here
// no kernel of that layout gets back.
//
//   g++ -std=c++17 -O2 -mavx512f benchmarks/reading_order.cc -o /tmp/reading_order
//   taskset -c 0 /tmp/reading_order
#include <immintrin.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kTotal = int64_t{1} << 30, kHugePage = 2 << 20, kKiB = 1024;
constexpr int kBlocks = 16, kReadings = 7, kStep = 256;

using Runs = std::vector<const uint8_t*>;

double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

const uint8_t* HugePages() {
  void* const memory =
      mmap(nullptr, kTotal + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::fprintf(stderr, "reading_order: no room for %lld bytes\n",
                 static_cast<long long>(kTotal + kHugePage));
    std::exit(1);
  }
  const auto up = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  auto* const begin = reinterpret_cast<uint8_t*>(up);
  madvise(begin, kTotal, MADV_HUGEPAGE);
  std::memset(begin, 1, kTotal);
  return begin;
}

// Rows of `kBlocks` blocks of `heads` runs each, head by head.
Runs InOrder(const uint8_t* memory, int64_t heads, int64_t run_bytes) {
  Runs runs;
  const int64_t row_bytes = kBlocks * heads * run_bytes;
  for (int64_t row = 0; row + row_bytes <= kTotal; row += row_bytes) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t block = 0; block < kBlocks; ++block) {
        runs.push_back(memory + row + (block * heads + head) * run_bytes);
      }
    }
  }
  return runs;
}

void Read(const Runs& runs, int64_t run_bytes, int64_t ahead) {
  __m512i even = _mm512_setzero_si512(), odd = even;
  const auto load = [](const uint8_t* at) { return _mm512_loadu_si512(at); };
  for (size_t i = 0; i < runs.size(); ++i) {
    const uint8_t* const next = runs[std::min(i + 1, runs.size() - 1)] - run_bytes;
    for (int64_t at = 0; at < run_bytes; at += kStep) {
      const uint8_t* const here = runs[i] + at;
      const uint8_t* const far = (at + ahead < run_bytes ? runs[i] : next) + at + ahead;
      for (int line = 0; ahead > 0 && line < kStep; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(far + line), _MM_HINT_T0);
      }
      even = _mm512_or_si512(_mm512_or_si512(even, load(here)), load(here + 64));
      odd = _mm512_or_si512(_mm512_or_si512(odd, load(here + 128)), load(here + 192));
    }
  }
  asm volatile("" ::"v"(even), "v"(odd));
}

struct Case {
  int64_t heads, run_bytes, ahead;
  Runs runs;
  std::vector<double> rates;
};

}  // namespace

int main() {
  if (!__builtin_cpu_supports("avx512f")) {
    std::fprintf(stderr, "reading_order: this processor has no AVX-512\n");
    return 1;
  }
  const uint8_t* const memory = HugePages();
  std::vector<Case> cases;
  for (const int64_t ahead : {int64_t{0}, 2 * kKiB, 4 * kKiB, 8 * kKiB}) {
    cases.push_back({1, 128 * kKiB, ahead, InOrder(memory, 1, 128 * kKiB), {}});
    for (const int64_t run : {32 * kKiB, 64 * kKiB, 128 * kKiB, 256 * kKiB}) {
      cases.push_back({8, run, ahead, InOrder(memory, 8, run), {}});
    }
  }
  for (int reading = 0; reading < kReadings; ++reading) {
    for (Case& one : cases) {
      const double began = CpuSeconds();
      Read(one.runs, one.run_bytes, one.ahead);
      const auto bytes = static_cast<double>(one.run_bytes) * static_cast<double>(one.runs.size());
      one.rates.push_back(1e-9 * bytes / (CpuSeconds() - began));
    }
  }
  double best = 0.0;
  for (Case& one : cases) {
    std::sort(one.rates.begin(), one.rates.end());
    best = std::max(best, one.rates[kReadings / 2]);
  }
  for (const Case& one : cases) {
    const double rate = one.rates[kReadings / 2];
    std::printf("%lld head(s), runs of %3lld KiB, %lld KiB ahead: %5.1f GB/s, %.3f of the best\n",
                static_cast<long long>(one.heads), static_cast<long long>(one.run_bytes / kKiB),
                static_cast<long long>(one.ahead / kKiB), rate, rate / best);
  }
}
