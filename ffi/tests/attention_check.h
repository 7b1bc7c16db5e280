// What every kernel must do, checked: whole and split at blocks, all entries and some.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "attention.h"
#include "cases.h"
#include "check.h"
#include "dispatch.h"

namespace wscope {

#if defined(__x86_64__)
extern const Kernel kEmulatedAmxKernel;
#endif

// A state with memory of its own.
class OwnState {
 public:
  explicit OwnState(const AttentionShape& shape)
      : o_(size_t(shape.group()) * shape.value_dim), max_(shape.group()), sum_(shape.group()) {
    ClearState(HeadOf(shape), get());
  }
  SoftmaxState get() { return {o_.data(), max_.data(), sum_.data()}; }

 private:
  std::vector<float> o_, max_, sum_;
};

struct Head {
  std::vector<float> o, lse;
};

// Attends to the blocks in two runs, [0, split) and [split, n), and merges; where `split` is odd
// the second one goes on with the state of the first.
inline Head AttendSplit(const Kernel& kernel, const CaseData& data, int row, int head, int split,
                        const Selected& selected = {}) {
  const AttentionShape& shape = data.shape;
  const HeadShape head_shape = HeadOf(shape);
  std::vector<const uint8_t*> blocks;
  for (int at = data.row_ptr[row]; at < data.row_ptr[row + 1]; ++at) {
    blocks.push_back(data.pool->Block(0, data.table[at]));
  }
  const float* const q =
      &data.q[(size_t(row) * shape.num_q_heads + size_t(head) * shape.group()) * shape.key_dim];
  const int64_t scratch_bytes = (kernel.scratch_bytes(head_shape) + 63) / 64 * 64;
  const std::unique_ptr<void, decltype(&std::free)> scratch(std::aligned_alloc(64, scratch_bytes),
                                                            &std::free);
  OwnState states[] = {OwnState(shape), OwnState(shape)};
  for (const int half : {0, 1}) {
    const int first = half == 0 ? 0 : split;
    const int last = half == 0 ? split : int(blocks.size());
    const HeadBlocks run{blocks.data() + first, last - first, head * shape.head_bytes(),
                         selected.empty() ? nullptr : &selected[first * (shape.block / 32)],
                         kOwnPrefetch};
    std::memset(scratch.get(), 0xff, scratch_bytes);  // NaN, should anything be read unwritten.
    kernel.attend(head_shape, q, run, scratch.get(), states[split % 2 == 1 ? 0 : half].get());
  }
  MergeState(shape, states[1].get(), states[0].get());
  Head result{std::vector<float>(size_t(shape.group()) * shape.value_dim),
              std::vector<float>(shape.group())};
  FinishState(shape, states[0].get(), result.o.data(), result.lse.data());
  return result;
}

inline void TestCase(const Kernel& isa, const Case& test) {
  const CaseData data(test);
  const Expected expected = Reference(data);
  const AttentionShape& shape = test.shape;
  const HeadShape head_shape = HeadOf(shape);
  const Kernel& kernel = Resolve(isa, head_shape);
  double o_error = 0.0;
  double lse_error = 0.0;
  RelativeRms rms;
  for (int row = 0; row < data.num_rows; ++row) {
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      const size_t h = size_t(row) * shape.num_q_heads + size_t(head) * shape.group();
      const auto o_begin = expected.o.begin() + h * shape.value_dim;
      const std::vector<double> o(o_begin, o_begin + size_t(shape.group()) * shape.value_dim);
      const std::vector<double> lse(expected.lse.begin() + h,
                                    expected.lse.begin() + h + shape.group());
      const int num_blocks = data.row_ptr[row + 1] - data.row_ptr[row];
      const int step = std::max(1, num_blocks / 4);
      for (int split = 0; split <= num_blocks; split += step) {
        const Head got = AttendSplit(kernel, data, row, head, split);
        o_error = std::max(o_error, MaxError(got.o.data(), o));
        rms.Add(got.o.data(), o);
        lse_error = std::max(lse_error, MaxError(got.lse.data(), lse));
      }
    }
  }
  std::printf("%-12s %-12s %-16s o %.1e rms %.1e lse %.1e\n", isa.name, kernel.name,
              test.name.c_str(), o_error, rms.Value(), lse_error);
  CHECK(o_error <= Tolerance(test) + (kernel.exact ? 0.0 : kRoundedO));
  CHECK(rms.Value() <= (kernel.exact ? ExactRms(test) : kRoundedRms));
  CHECK(lse_error <= Tolerance(test) + (kernel.exact ? 0.0 : 1e-4));
}

// Some entries of each row count: none, one, every third, whole tiles, all.
inline void TestSelected(const Kernel& isa, const Case& test) {
  const CaseData data(test);
  const AttentionShape& shape = test.shape;
  const HeadShape head_shape = HeadOf(shape);
  const Kernel& kernel = Resolve(isa, head_shape);
  for (int row = 0; row < data.num_rows; ++row) {
    const int num_blocks = data.row_ptr[row + 1] - data.row_ptr[row];
    if (num_blocks == 0) continue;
    const int words = num_blocks * (shape.block / 32);
    Selected one(words), third(words, 0x49249249u), tiles(words), last(words);
    one[words / 2] = 1u << 17;
    for (int i = 0; i < words; i += 2) tiles[i] = ~0u;
    last[words - 1] = ~0u;
    for (const Selected& selected :
         {Selected(words), one, third, tiles, last, Selected(words, ~0u)}) {
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        const Head got = AttendSplit(kernel, data, row, head, num_blocks / 2, selected);
        for (int h = 0; h < shape.group(); ++h) {
          std::vector<double> o;
          double lse = 0.0;
          ReferenceHead(data, row, head * shape.group() + h, selected, &o, &lse);
          CHECK(MaxError(&got.o[size_t(h) * shape.value_dim], o) <=
                Tolerance(test) + (kernel.exact ? 0.0 : kRoundedO));
          CHECK(MaxError(&got.lse[h], {lse}) <= Tolerance(test) + (kernel.exact ? 0.0 : 1e-4));
        }
      }
    }
  }
}

// The kernels that can run here, the one for AMX on emulated tiles among them.
inline std::vector<const Kernel*> KernelsToTest() {
  std::vector<const Kernel*> kernels = AvailableKernels();
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16")) kernels.push_back(&kEmulatedAmxKernel);
#endif
  return kernels;
}

}  // namespace wscope
