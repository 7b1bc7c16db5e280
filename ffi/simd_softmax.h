// The softmax of a block of scores, one head after the other.
#pragma once

#include "simd_walk.h"

// What the softmax of a block prefetches, so that memory does not idle: `lines` with each 32
// weights. The values pass then leaves out one row in kSpareRows.
constexpr int kSpareRows = 8;

inline bool IsSpareRow(int row) { return row % kSpareRows == kSpareRows - 1; }

inline int SoftmaxLines(const HeadShape& shape) {
  if (shape.value_in_key) return 0;
  const int64_t row_bytes = shape.value_dim * ItemBytes(shape);
  return static_cast<int>(kEntryTile * row_bytes / (64 * kSpareRows * shape.group));
}

// Turns one head's scores into weights 2^(scale * score - max) and brings its state to the new max.
// put(i, w, w_2) takes the weights of 32 entries from i on.
template <typename Exp, typename Put>
inline void SoftmaxHead(const HeadShape& shape, const uint32_t* selected, float scale,
                        float* scores, float* o, float* state_max, float* state_sum, Exp exp2,
                        Put put) {
  if (selected) {
    for (int i = 0; i < shape.block; i += kLanes) {
      const uint32_t bits = selected[i / 32] >> (i % 32);
      Store(scores + i, Select(bits & 0xffff, Load(scores + i), Set1(kNoScore)));
    }
  }
  Vec top = Load(scores);
  Vec top_2 = Load(scores + kLanes);
  for (int i = 2 * kLanes; i < shape.block; i += 2 * kLanes) {
    top = Max(top, Load(scores + i));
    top_2 = Max(top_2, Load(scores + i + kLanes));
  }
  const float block_max = scale * ReduceMax(Max(top, top_2));
  const float old_max = *state_max;
  const float max = block_max > old_max ? block_max : old_max;
  if (max == kNoScore) {  // Nothing selected so far: no weight may become NaN.
    for (int i = 0; i < shape.block; i += 2 * kLanes) put(i, Zero(), Zero());
    return;
  }
  const Vec factor = Set1(scale);
  const Vec minus_max = Set1(-max);
  Vec sum = Zero(), sum_2 = Zero();
  for (int i = 0; i < shape.block; i += 2 * kLanes) {
    const Vec w = exp2(Fma(Load(scores + i), factor, minus_max));
    const Vec w_2 = exp2(Fma(Load(scores + i + kLanes), factor, minus_max));
    put(i, w, w_2);
    sum = Add(sum, w);
    sum_2 = Add(sum_2, w_2);
  }
  float shrink = 1.0f;
  if (max > old_max) {
    shrink = old_max == kNoScore ? 0.0f : __builtin_exp2f(old_max - max);
    const Vec shrinks = Set1(shrink);
    int d = 0;
    for (; d + kLanes <= shape.value_dim; d += kLanes) Store(o + d, Mul(Load(o + d), shrinks));
    const int rest = shape.value_dim - d;
    if (rest > 0) StorePart(o + d, Mul(LoadPart(o + d, rest), shrinks), rest);
  }
  *state_max = max;
  *state_sum = *state_sum * shrink + ReduceAdd(Add(sum, sum_2));
}

inline void Softmax(const HeadShape& shape, const uint32_t* selected, float* scores,
                    const SoftmaxState& state, Cursor& cursor) {
  const int lines = SoftmaxLines(shape);
  for (int h = 0; h < shape.group; ++h) {
    float* const row = scores + int64_t{h} * shape.block;
    SoftmaxHead(
        shape, selected, shape.scale * kLog2E, row, state.o + int64_t{h} * shape.value_dim,
        state.max + h, state.sum + h, [](Vec x) { return Exp2(x); },
        [row, lines, &cursor](int i, Vec w, Vec w_2) {
          cursor.Lines(lines);
          Store(row + i, w);
          Store(row + i + kLanes, w_2);
        });
  }
}
