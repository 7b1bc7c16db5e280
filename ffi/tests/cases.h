// The attention cases that every kernel must get right, and the float64 reference for them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "pool.h"
#include "tiles.h"

namespace wscope {

enum class Scores { kRandom, kEqual, kHuge, kRising };

struct Case {
  std::string name;
  AttentionShape shape;
  std::vector<int> row_blocks;  // Blocks of each row.
  Scores scores = Scores::kRandom;
};

inline std::vector<Case> AllCases() {
  const Storage f32 = Storage::kFloat32;
  const Storage bf16 = Storage::kBfloat16;
  return {
      // H, G, K, V, value in key, D, storage, scale
      {"mha_d64", {2, 2, 64, 64, false, 32, f32, 0.125f}, {3, 1}},
      {"gqa2_d128", {4, 2, 128, 128, false, 32, bf16, 0.088f}, {2, 5}},
      {"gqa4_d128", {32, 8, 128, 128, false, 32, bf16, 0.088f}, {1, 4}},
      {"gqa8_d128", {32, 4, 128, 128, false, 64, bf16, 0.088f}, {3}},
      {"gqa8_d128_f32", {32, 4, 128, 128, false, 256, f32, 0.088f}, {2, 0, 1}},
      {"mqa16_d80", {16, 1, 80, 80, false, 32, bf16, 0.11f}, {7}},
      {"odd_d20", {6, 2, 20, 20, false, 32, f32, 0.22f}, {1, 2, 3}},
      {"odd_k24_v20", {5, 1, 24, 20, false, 32, bf16, 0.2f}, {4, 1}},
      {"tiny_d1", {3, 3, 1, 1, false, 32, f32, 1.0f}, {2}},
      {"v_wider", {4, 2, 24, 40, false, 32, f32, 0.2f}, {2, 2}},
      {"mla16_576", {16, 1, 576, 512, true, 32, bf16, 0.072f}, {3, 1}},
      {"mla16_72_f32", {16, 1, 72, 64, true, 64, f32, 0.12f}, {2, 9}},
      {"v4_64_512", {64, 1, 512, 512, true, 32, bf16, 0.044f}, {2}},
      {"mla5_40_33", {5, 1, 40, 33, true, 32, bf16, 0.16f}, {3, 1}},
      {"mla5_40_33_f32", {5, 1, 40, 33, true, 64, f32, 0.16f}, {3, 1}},
      {"mla7_96_41", {7, 1, 96, 41, true, 32, bf16, 0.1f}, {2}},
      {"mla20_64_32", {20, 1, 64, 32, true, 96, bf16, 0.12f}, {2, 1}},
      {"gqa20_d96", {20, 1, 96, 112, false, 96, bf16, 0.1f}, {2, 1}},
      {"gqa7_d160", {14, 2, 160, 160, false, 32, bf16, 0.08f}, {2, 3}},
      {"gqa3_d33_v65", {6, 2, 33, 65, false, 32, bf16, 0.17f}, {2, 3}},
      {"empty", {8, 2, 16, 16, false, 32, f32, 0.25f}, {0, 0}},
      {"empty_among", {8, 2, 16, 16, false, 32, bf16, 0.25f}, {0, 3, 0, 0, 1, 0}},
      {"many", {4, 2, 16, 16, false, 32, bf16, 0.25f}, {61, 1, 40}},
      {"ragged", {8, 4, 32, 32, false, 32, f32, 0.18f}, {1, 17, 2, 5, 1, 1, 30, 3}},
      {"equal", {8, 2, 32, 32, false, 32, bf16, 0.18f}, {6, 1}, Scores::kEqual},
      {"huge", {8, 2, 32, 32, false, 32, f32, 1.0f}, {6, 1}, Scores::kHuge},
      {"huge_bf16", {16, 1, 40, 32, true, 32, bf16, 1.0f}, {6, 1}, Scores::kHuge},
      {"rising", {8, 2, 32, 32, false, 32, bf16, 1.0f}, {6, 1}, Scores::kRising},
      {"rising_latent", {20, 1, 64, 32, true, 32, bf16, 1.0f}, {6, 1}, Scores::kRising},
      {"large",
       {4, 2, 32, 32, false, 32, f32, 0.18f},
       {150, 0, 90, 3}},  // Several rounds of parts.
  };
}

inline uint16_t ToBfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float FromBfloat16(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// A case's data: a pool of one layer in which the rows' blocks lie mixed up, and queries.
class CaseData {
 public:
  explicit CaseData(const Case& test) : shape(test.shape), num_rows(int(test.row_blocks.size())) {
    const int num_blocks = std::accumulate(test.row_blocks.begin(), test.row_blocks.end(), 0);
    pool = std::make_shared<Pool>(1, num_blocks + 1, shape.block_bytes());
    pool->Commit(num_blocks + 1);
    row_ptr.push_back(0);
    for (const int blocks : test.row_blocks) row_ptr.push_back(row_ptr.back() + blocks);
    table.resize(num_blocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random_);
    for (int slot = 0; slot < num_blocks; ++slot) FillBlock(slot, test.scores);
    q.resize(size_t(num_rows) * shape.num_q_heads * shape.key_dim);
    // As bfloat16 if the entries are: a model computes in the type that it stores.
    const bool rounds = shape.storage == Storage::kBfloat16;
    for (float& number : q) {
      number = normal_(random_);
      if (rounds) number = FromBfloat16(ToBfloat16(number));
    }
    if (test.scores == Scores::kHuge) MakeHuge();
    if (test.scores == Scores::kRising) MakeRising();
  }

  // Where dim `d` of the key of an entry lies in its head.
  int64_t KeyAt(int entry, int d) const {
    const bool bfloat16 = shape.storage == Storage::kBfloat16;
    return shape.value_in_key
               ? ValueIndex(shape.key_dim, shape.key_dim, shape.block, bfloat16, entry, d)
               : KeyIndex(shape.key_dim, bfloat16, entry, d);
  }
  int64_t ValueAt(int entry, int d) const {
    if (shape.value_in_key) return KeyAt(entry, d);
    return int64_t{shape.block} * shape.key_dim +
           ValueIndex(shape.value_dim, kPanelDims, shape.block, shape.storage == Storage::kBfloat16,
                      entry, d);
  }

  float Stored(int slot, int head, int64_t index) const {
    const uint8_t* const begin = pool->Block(0, slot) + head * shape.head_bytes();
    if (shape.storage == Storage::kFloat32) {
      return reinterpret_cast<const float*>(begin)[index];
    }
    return FromBfloat16(reinterpret_cast<const uint16_t*>(begin)[index]);
  }

  const AttentionShape shape;
  const int num_rows;
  std::shared_ptr<Pool> pool;
  std::vector<int32_t> row_ptr;
  std::vector<int32_t> table;
  std::vector<float> q;  // [b, H, K]

 private:
  void FillBlock(int slot, Scores scores) {
    const int64_t count = shape.block * shape.stored_dim();
    const int64_t keys = int64_t{shape.block} * shape.key_dim;
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      for (int64_t i = 0; i < count; ++i) {
        // Equal keys make equal scores; the values still differ.
        const bool equal = scores == Scores::kEqual && i < keys && !shape.value_in_key;
        SetStored(slot, head, i, equal ? 0.25f : normal_(random_));
      }
    }
  }

  // Scores of about +1e4 and -1e4 by the first number of key and query.
  void MakeHuge() {
    for (const int slot : table) {
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        for (int entry = 0; entry < shape.block; ++entry) {
          SetStored(slot, head, KeyAt(entry, 0), entry % 3 == 0 ? 100.0f : -100.0f);
        }
      }
    }
    for (size_t h = 0; h * shape.key_dim < q.size(); ++h) {
      q[h * shape.key_dim] = h % 2 == 0 ? 100.0f : -100.0f;
    }
  }

  // From block to block of a row the scores rise by 12 or by 3, stay as they are or fall: by the
  // first number of key and query, in turns from head to head.
  void MakeRising() {
    for (int row = 0; row < num_rows; ++row) {
      for (int at = row_ptr[row]; at < row_ptr[row + 1]; ++at) {
        for (int head = 0; head < shape.num_kv_heads; ++head) {
          for (int entry = 0; entry < shape.block; ++entry) {
            SetStored(table[at], head, KeyAt(entry, 0), float(at - row_ptr[row]));
          }
        }
      }
    }
    const float slopes[] = {12.0f, 3.0f, 0.0f, -12.0f};
    for (size_t h = 0; h * shape.key_dim < q.size(); ++h) q[h * shape.key_dim] = slopes[h % 4];
  }

  void SetStored(int slot, int head, int64_t index, float value) {
    uint8_t* const begin = pool->Block(0, slot) + head * shape.head_bytes();
    if (shape.storage == Storage::kFloat32) {
      reinterpret_cast<float*>(begin)[index] = value;
    } else {
      reinterpret_cast<uint16_t*>(begin)[index] = ToBfloat16(value);
    }
  }

  std::mt19937 random_{7};
  std::normal_distribution<float> normal_;
};

struct Expected {
  std::vector<double> o;    // [b, H, V]
  std::vector<double> lse;  // [b, H]
};

// The entries that count of a row: bit e % 32 of word e / 32; empty = all.
using Selected = std::vector<uint32_t>;

// The softmax as it is written in a book, in float64, of one query head of a row.
inline void ReferenceHead(const CaseData& data, int row, int h, const Selected& selected,
                          std::vector<double>* o, double* lse) {
  const AttentionShape& shape = data.shape;
  const int head = h / shape.group();
  const float* const q = &data.q[(size_t(row) * shape.num_q_heads + h) * shape.key_dim];
  std::vector<double> scores;
  std::vector<double> values;
  for (int at = data.row_ptr[row]; at < data.row_ptr[row + 1]; ++at) {
    for (int entry = 0; entry < shape.block; ++entry) {
      const int in_row = (at - data.row_ptr[row]) * shape.block + entry;
      if (!selected.empty() && (selected[in_row / 32] >> (in_row % 32) & 1) == 0) continue;
      double score = 0.0;
      for (int d = 0; d < shape.key_dim; ++d) {
        score += double(q[d]) * data.Stored(data.table[at], head, data.KeyAt(entry, d));
      }
      scores.push_back(score * double(shape.scale));
      for (int d = 0; d < shape.value_dim; ++d) {
        values.push_back(data.Stored(data.table[at], head, data.ValueAt(entry, d)));
      }
    }
  }
  double max = -std::numeric_limits<double>::infinity();
  for (const double score : scores) max = std::max(max, score);
  double sum = 0.0;
  o->assign(shape.value_dim, 0.0);
  for (size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - max);
    sum += weight;
    for (int d = 0; d < shape.value_dim; ++d) (*o)[d] += weight * values[i * shape.value_dim + d];
  }
  for (double& number : *o) number = scores.empty() ? 0.0 : number / sum;
  *lse = scores.empty() ? max : max + std::log(sum);
}

inline Expected Reference(const CaseData& data) {
  Expected expected;
  for (int row = 0; row < data.num_rows; ++row) {
    for (int h = 0; h < data.shape.num_q_heads; ++h) {
      std::vector<double> o;
      double lse = 0.0;
      ReferenceHead(data, row, h, {}, &o, &lse);
      expected.o.insert(expected.o.end(), o.begin(), o.end());
      expected.lse.push_back(lse);
    }
  }
  return expected;
}

// The largest difference, or infinity where only one of the two is minus infinity or there is NaN.
inline double MaxError(const float* got, const std::vector<double>& want) {
  double worst = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isinf(want[i]) && want[i] == got[i]) continue;
    const double error = std::abs(got[i] - want[i]);
    worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
  }
  return worst;
}

// Root of the mean square of the differences over that of what is wanted.
class RelativeRms {
 public:
  void Add(const float* got, const std::vector<double>& want) {
    for (size_t i = 0; i < want.size(); ++i) {
      error_ += (got[i] - want[i]) * (got[i] - want[i]);
      norm_ += want[i] * want[i];
    }
  }
  double Value() const { return norm_ == 0.0 ? std::sqrt(error_) : std::sqrt(error_ / norm_); }

 private:
  double error_ = 0.0, norm_ = 0.0;
};

// What float32 sums may differ from float64; scores of 1e4 have an ulp of 1e-3.
inline double Tolerance(const Case& test) {
  if (test.scores == Scores::kHuge) return 2e-2;
  return test.scores == Scores::kRising ? 1e-4 : 2e-5;
}
inline double ExactRms(const Case& test) { return test.scores == Scores::kHuge ? 2e-2 : 1e-5; }
// What the rounding of weights to bfloat16 adds, to the largest difference of values of about 1 and
// to the relative root mean square of a case. Of one head of 16 dims alone it is 1.6e-3 on average
// and up to 3e-3, by chance: each weight is off by up to 2^-9.
constexpr double kRoundedO = 2e-2;
constexpr double kRoundedRms = 2e-3;

}  // namespace wscope
