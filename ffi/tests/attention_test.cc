// The kernel alone: one head at a time, whole and split at every block.
#include "attention.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "cases.h"
#include "check.h"

namespace wscope {
namespace {

// A state with memory of its own.
class OwnState {
 public:
  explicit OwnState(const AttentionShape& shape)
      : o_(size_t(shape.group()) * shape.value_dim), max_(shape.group()), sum_(shape.group()) {
    ClearState(shape, get());
  }
  SoftmaxState get() { return {o_.data(), max_.data(), sum_.data()}; }

 private:
  std::vector<float> o_, max_, sum_;
};

struct Head {
  std::vector<float> o, lse;
};

// Attends to the blocks in two runs, [0, split) and [split, n), and merges.
Head AttendSplit(const CaseData& data, int row, int head, int split) {
  const AttentionShape& shape = data.shape;
  std::vector<const uint8_t*> blocks;
  for (int at = data.row_ptr[row]; at < data.row_ptr[row + 1]; ++at) {
    blocks.push_back(data.pool->Block(0, data.table[at]));
  }
  const float* const q =
      &data.q[(size_t(row) * shape.num_q_heads + size_t(head) * shape.group()) * shape.key_dim];
  std::vector<float> scratch(ScratchFloats(shape));
  OwnState first(shape);
  OwnState second(shape);
  const int64_t offset = head * shape.head_bytes();
  Attend(shape, q, blocks.data(), split, offset, scratch.data(), first.get());
  Attend(shape, q, blocks.data() + split, int(blocks.size()) - split, offset, scratch.data(),
         second.get());
  MergeState(shape, second.get(), first.get());
  Head result{std::vector<float>(size_t(shape.group()) * shape.value_dim),
              std::vector<float>(shape.group())};
  FinishState(shape, first.get(), result.o.data(), result.lse.data());
  return result;
}

void TestCase(const Case& test) {
  const CaseData data(test);
  const Expected expected = Reference(data);
  const AttentionShape& shape = test.shape;
  double o_error = 0.0;
  double lse_error = 0.0;
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
        const Head got = AttendSplit(data, row, head, split);
        o_error = std::max(o_error, MaxError(got.o.data(), o));
        lse_error = std::max(lse_error, MaxError(got.lse.data(), lse));
      }
    }
  }
  std::printf("%-16s o %.1e lse %.1e\n", test.name.c_str(), o_error, lse_error);
  CHECK(o_error <= OTolerance(test));
  CHECK(lse_error <= LseTolerance(test));
}

void TestEmptyMerge() {
  const AttentionShape shape{2, 1, 8, 8, false, 32, Storage::kFloat32, 1.0f};
  OwnState a(shape);
  OwnState b(shape);
  MergeState(shape, a.get(), b.get());
  float o[16];
  float lse[2];
  FinishState(shape, b.get(), o, lse);
  for (const float number : o) CHECK(number == 0.0f);
  for (const float number : lse) CHECK(number == -std::numeric_limits<float>::infinity());
}

void TestCheckShape() {
  const AttentionShape good{4, 2, 8, 8, false, 32, Storage::kFloat32, 1.0f};
  CHECK(CheckShape(good).empty());
  AttentionShape bad = good;
  bad.num_kv_heads = 3;
  CHECK(CheckShape(bad).find("num_q_heads") == 0);
  bad = good;
  bad.block = 0;
  CHECK(CheckShape(bad).find("block") == 0);
  bad = good;
  bad.value_in_key = true;
  bad.value_dim = 9;
  CHECK(CheckShape(bad).find("value_dim") == 0);
  bad = good;
  bad.num_q_heads = bad.num_kv_heads = bad.key_dim = bad.block = INT32_MAX;
  CHECK(CheckShape(bad).find("overflow") != std::string::npos);
}

}  // namespace
}  // namespace wscope

int main() {
  for (const wscope::Case& test : wscope::AllCases()) wscope::TestCase(test);
  wscope::TestEmptyMerge();
  wscope::TestCheckShape();
}
