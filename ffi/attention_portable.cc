// Plain C++ for any layout and processor: the oracle of the other kernels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention.h"

namespace wscope {
namespace {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();
constexpr int kLanes = 16;  // Independent sums of a dot product; the compiler makes them vectors.
constexpr int kHeads = 4;   // Query heads that share one pass over a key or value.

float ToFloat(float value) { return value; }
float ToFloat(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename T>
void Widen(const T* from, int count, float* __restrict to) {
  for (int i = 0; i < count; ++i) to[i] = ToFloat(from[i]);
}

// Dot products of `key` with kCount rows of q.
template <int kCount>
void Dot(const float* q, const float* key, int key_dim, float* dots) {
  float sums[kCount][kLanes] = {};
  int d = 0;
  for (; d + kLanes <= key_dim; d += kLanes) {
    for (int h = 0; h < kCount; ++h) {
      const float* const row = q + static_cast<int64_t>(h) * key_dim + d;
      for (int i = 0; i < kLanes; ++i) sums[h][i] += row[i] * key[d + i];
    }
  }
  for (int h = 0; h < kCount; ++h) {
    const float* const row = q + static_cast<int64_t>(h) * key_dim;
    float dot = 0.0f;
    for (int i = d; i < key_dim; ++i) dot += row[i] * key[i];
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) sums[h][i] += sums[h][i + width];
    }
    dots[h] = sums[h][0] + dot;
  }
}

// o[h] += weights[h] * value for kCount rows.
template <int kCount>
void Accumulate(const float* weights, const float* __restrict value, int value_dim,
                float* __restrict o) {
  for (int h = 0; h < kCount; ++h) {
    float* const row = o + static_cast<int64_t>(h) * value_dim;
    const float weight = weights[h];
    for (int d = 0; d < value_dim; ++d) row[d] += weight * value[d];
  }
}

// Turns the scores of a block into weights exp(score - max) and brings the state to the new max.
void Softmax(const AttentionShape& shape, float* weights, const SoftmaxState& state) {
  const int group = shape.group();
  for (int h = 0; h < group; ++h) {
    float max = state.max[h];
    for (int i = 0; i < shape.block; ++i) max = std::max(max, weights[i * group + h]);
    // exp(-inf) = 0 at the first block: the empty sum stays empty.
    const float shrink = std::exp(state.max[h] - max);
    float sum = 0.0f;
    for (int i = 0; i < shape.block; ++i) {
      float& weight = weights[i * group + h];
      weight = std::exp(weight - max);
      sum += weight;
    }
    state.max[h] = max;
    state.sum[h] = state.sum[h] * shrink + sum;
    if (shrink != 1.0f) {
      float* const row = state.o + static_cast<int64_t>(h) * shape.value_dim;
      for (int d = 0; d < shape.value_dim; ++d) row[d] *= shrink;
    }
  }
}

template <typename T>
void AttendBlock(const AttentionShape& shape, const float* q, const T* head, float* scratch,
                 const SoftmaxState& state) {
  const int group = shape.group();
  const int key_dim = shape.key_dim;
  const int value_dim = shape.value_dim;
  float* const weights = scratch;                                           // [D, H / G]
  float* const wide = scratch + static_cast<int64_t>(shape.block) * group;  // [max(K, V)]

  const T* key = head;
  for (int i = 0; i < shape.block; ++i, key += key_dim) {
    Widen(key, key_dim, wide);
    float* const scores = weights + i * group;
    int h = 0;
    for (; h + kHeads <= group; h += kHeads) {
      Dot<kHeads>(q + static_cast<int64_t>(h) * key_dim, wide, key_dim, scores + h);
    }
    for (; h < group; ++h) {
      Dot<1>(q + static_cast<int64_t>(h) * key_dim, wide, key_dim, scores + h);
    }
    for (h = 0; h < group; ++h) scores[h] *= shape.scale;
  }

  Softmax(shape, weights, state);

  const int value_stride = shape.value_in_key ? key_dim : value_dim;
  const T* value = shape.value_in_key ? head : head + static_cast<int64_t>(shape.block) * key_dim;
  for (int i = 0; i < shape.block; ++i, value += value_stride) {
    Widen(value, value_dim, wide);
    const float* const row = weights + i * group;
    int h = 0;
    for (; h + kHeads <= group; h += kHeads) {
      Accumulate<kHeads>(row + h, wide, value_dim, state.o + static_cast<int64_t>(h) * value_dim);
    }
    for (; h < group; ++h) {
      Accumulate<1>(row + h, wide, value_dim, state.o + static_cast<int64_t>(h) * value_dim);
    }
  }
}

template <typename T>
void AttendBlocks(const AttentionShape& shape, const float* q, const uint8_t* const* blocks,
                  int num_blocks, int64_t head_offset, float* scratch, const SoftmaxState& state) {
  for (int i = 0; i < num_blocks; ++i) {
    AttendBlock(shape, q, reinterpret_cast<const T*>(blocks[i] + head_offset), scratch, state);
  }
}

}  // namespace

int64_t ScratchFloats(const AttentionShape& shape) {
  return static_cast<int64_t>(shape.block) * shape.group() +
         std::max(shape.key_dim, shape.value_dim);
}

void Attend(const AttentionShape& shape, const float* q, const uint8_t* const* blocks,
            int num_blocks, int64_t head_offset, float* scratch, const SoftmaxState& state) {
  if (shape.storage == Storage::kFloat32) {
    AttendBlocks<float>(shape, q, blocks, num_blocks, head_offset, scratch, state);
  } else {
    AttendBlocks<uint16_t>(shape, q, blocks, num_blocks, head_offset, scratch, state);
  }
}

void ClearState(const AttentionShape& shape, const SoftmaxState& state) {
  const int group = shape.group();
  std::fill_n(state.o, static_cast<int64_t>(group) * shape.value_dim, 0.0f);
  std::fill_n(state.max, group, kNoScore);
  std::fill_n(state.sum, group, 0.0f);
}

void MergeState(const AttentionShape& shape, const SoftmaxState& from, const SoftmaxState& into) {
  for (int h = 0; h < shape.group(); ++h) {
    const float max = std::max(from.max[h], into.max[h]);
    if (max == kNoScore) continue;  // Both empty: -inf minus -inf would be NaN.
    const float weight_from = std::exp(from.max[h] - max);
    const float weight_into = std::exp(into.max[h] - max);
    into.max[h] = max;
    into.sum[h] = into.sum[h] * weight_into + from.sum[h] * weight_from;
    const float* const row_from = from.o + static_cast<int64_t>(h) * shape.value_dim;
    float* const row_into = into.o + static_cast<int64_t>(h) * shape.value_dim;
    for (int d = 0; d < shape.value_dim; ++d) {
      row_into[d] = row_into[d] * weight_into + row_from[d] * weight_from;
    }
  }
}

void FinishState(const AttentionShape& shape, const SoftmaxState& state, float* o, float* lse) {
  for (int h = 0; h < shape.group(); ++h) {
    const bool empty = state.max[h] == kNoScore;
    lse[h] = empty ? kNoScore : state.max[h] + std::log(state.sum[h]);
    const float* const row = state.o + static_cast<int64_t>(h) * shape.value_dim;
    float* const out = o + static_cast<int64_t>(h) * shape.value_dim;
    for (int d = 0; d < shape.value_dim; ++d) out[d] = empty ? 0.0f : row[d] / state.sum[h];
  }
}

}  // namespace wscope
