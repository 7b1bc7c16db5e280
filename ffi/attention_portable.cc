// Plain C++ for any layout and processor: the oracle of the other kernels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernel.h"

namespace wscope {
namespace {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896341f;
constexpr int kHeads = 4;  // Query heads that share one pass over a key or value.

float ToFloat(float value) { return value; }
float ToFloat(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Entries that lie in one row beside each other.
template <typename T>
constexpr int kPair = 4 / sizeof(T);

// Brings the keys of 32 entries into rows [32, K].
template <typename T>
void KeyRows(const T* keys, int key_dim, float* rows) {
  for (int group = 0; group < kEntryTile; group += kLanes, rows += int64_t{kLanes} * key_dim) {
    int d = 0;
    for (; d + kPair<T> <= key_dim; d += kPair<T>) {
      for (int i = 0; i < kLanes * kPair<T>; ++i) {
        rows[i / kPair<T> * key_dim + d + i % kPair<T>] = ToFloat(*keys++);
      }
    }
    for (; d < key_dim; ++d) {
      for (int i = 0; i < kLanes; ++i) rows[i * key_dim + d] = ToFloat(*keys++);
    }
  }
}

// Brings the values of 32 entries in a panel of `dims` dims into rows [32, dims].
template <typename T>
void ValueRows(const T* values, int dims, float* rows) {
  for (int tile = 0; tile < dims; tile += kLanes) {
    const int width = std::min(kLanes, dims - tile);
    for (int entry = 0; entry < kEntryTile; entry += kPair<T>) {
      float* const row = rows + int64_t{entry} * dims + tile;
      for (int i = 0; i < width * kPair<T>; ++i) {
        row[i % kPair<T> * dims + i / kPair<T>] = ToFloat(*values++);
      }
    }
  }
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

// o[h] += weights[h] * value for kCount rows that lie `stride` apart.
template <int kCount>
void Accumulate(const float* weights, const float* __restrict value, int dims, int stride,
                float* __restrict o) {
  for (int h = 0; h < kCount; ++h) {
    float* const row = o + static_cast<int64_t>(h) * stride;
    const float weight = weights[h];
    for (int d = 0; d < dims; ++d) row[d] += weight * value[d];
  }
}

// Turns the scores of a block into weights 2^(score - max) and brings the state to the new max.
void Softmax(const HeadShape& shape, float* weights, const SoftmaxState& state) {
  const int group = shape.group;
  for (int h = 0; h < group; ++h) {
    float max = state.max[h];
    for (int i = 0; i < shape.block; ++i) max = std::max(max, weights[i * group + h]);
    if (max == kNoScore) {  // Nothing selected so far: -inf minus -inf would be NaN.
      for (int i = 0; i < shape.block; ++i) weights[i * group + h] = 0.0f;
      continue;
    }
    // 2^-inf = 0 at the first block: the empty sum stays empty.
    const float shrink = std::exp2(state.max[h] - max);
    float sum = 0.0f;
    for (int i = 0; i < shape.block; ++i) {
      float& weight = weights[i * group + h];
      weight = std::exp2(weight - max);
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

bool IsSelected(const uint32_t* selected, int entry) {
  return !selected || (selected[entry / 32] >> (entry % 32) & 1) != 0;
}

// weights[D, R] = scores of all entries in units of log2, -inf where not selected.
template <typename T>
void Scores(const HeadShape& shape, const float* q, const T* head, const uint32_t* selected,
            float* rows, float* weights) {
  const float scale = shape.scale * kLog2E;
  const int64_t key_dim = shape.key_dim;
  for (int chunk = 0; chunk < shape.block; chunk += kEntryTile, head += kEntryTile * key_dim) {
    if (shape.value_in_key) {
      ValueRows(head, shape.key_dim, rows);
    } else {
      KeyRows(head, shape.key_dim, rows);
    }
    for (int i = 0; i < kEntryTile; ++i) {
      float* const scores = weights + (int64_t{chunk} + i) * shape.group;
      const float* const key = rows + i * key_dim;
      int h = 0;
      for (; h + kHeads <= shape.group; h += kHeads) {
        Dot<kHeads>(q + h * key_dim, key, shape.key_dim, scores + h);
      }
      for (; h < shape.group; ++h) Dot<1>(q + h * key_dim, key, shape.key_dim, scores + h);
      const bool counts = IsSelected(selected, chunk + i);
      for (h = 0; h < shape.group; ++h) scores[h] = counts ? scores[h] * scale : kNoScore;
    }
  }
}

// o += weights * values, for the `dims` values of one panel of `stored` dims.
template <typename T>
void PanelValues(const HeadShape& shape, const float* weights, const T* panel, int stored, int dims,
                 float* rows, float* o) {
  for (int entry = 0; entry < shape.block; ++entry) {
    const int in_chunk = entry % kEntryTile;
    if (in_chunk == 0) {
      ValueRows(panel + static_cast<int64_t>(entry) * stored, stored, rows);
    }
    const float* const value = rows + static_cast<int64_t>(in_chunk) * stored;
    const float* const weight = weights + static_cast<int64_t>(entry) * shape.group;
    int h = 0;
    for (; h + kHeads <= shape.group; h += kHeads) {
      Accumulate<kHeads>(weight + h, value, dims, shape.value_dim,
                         o + static_cast<int64_t>(h) * shape.value_dim);
    }
    for (; h < shape.group; ++h) {
      Accumulate<1>(weight + h, value, dims, shape.value_dim,
                    o + static_cast<int64_t>(h) * shape.value_dim);
    }
  }
}

template <typename T>
void AttendBlock(const HeadShape& shape, const float* q, const T* head, const uint32_t* selected,
                 float* scratch, const SoftmaxState& state) {
  float* const weights = scratch;                                                 // [D, R]
  float* const rows = scratch + static_cast<int64_t>(shape.block) * shape.group;  // [32, K or 64]
  Scores(shape, q, head, selected, rows, weights);
  Softmax(shape, weights, state);
  if (shape.value_in_key) {
    PanelValues(shape, weights, head, shape.key_dim, shape.value_dim, rows, state.o);
    return;
  }
  const T* const values = head + static_cast<int64_t>(shape.block) * shape.key_dim;
  for (int first = 0; first < shape.value_dim; first += kPanelDims) {
    const int dims = std::min(kPanelDims, shape.value_dim - first);
    PanelValues(shape, weights, values + static_cast<int64_t>(first) * shape.block, dims, dims,
                rows, state.o + first);
  }
}

template <typename T>
void AttendBlocks(const HeadShape& shape, const float* q, const HeadBlocks& blocks, float* scratch,
                  const SoftmaxState& state) {
  for (int i = 0; i < blocks.num_blocks; ++i) {
    const uint32_t* const selected =
        blocks.selected ? blocks.selected + static_cast<int64_t>(i) * (shape.block / 32) : nullptr;
    AttendBlock(shape, q, reinterpret_cast<const T*>(blocks.blocks[i] + blocks.head_offset),
                selected, scratch, state);
  }
}

bool Supports(const HeadShape&) { return true; }

int64_t ScratchBytes(const HeadShape& shape) {
  const int64_t weights = static_cast<int64_t>(shape.block) * shape.group;
  const int64_t rows = static_cast<int64_t>(kEntryTile) * std::max(shape.key_dim, kPanelDims);
  return static_cast<int64_t>(sizeof(float)) * (weights + rows);
}

void Attend(const HeadShape& shape, const float* q, const HeadBlocks& blocks, void* scratch,
            const SoftmaxState& state) {
  if (shape.bfloat16) {
    AttendBlocks<uint16_t>(shape, q, blocks, static_cast<float*>(scratch), state);
  } else {
    AttendBlocks<float>(shape, q, blocks, static_cast<float*>(scratch), state);
  }
}

void Read(const uint8_t* from, int64_t bytes, int64_t /*prefetch_bytes*/) {
  uint64_t all[4] = {};
  for (int64_t i = 0; i < bytes; i += sizeof(all)) {
    uint64_t words[4];
    std::memcpy(words, from + i, sizeof(words));
    for (int k = 0; k < 4; ++k) all[k] |= words[k];
  }
  asm volatile("" : : "r"(all) : "memory");  // Or the compiler may see that nobody needs it.
}

}  // namespace

const Kernel kPortableKernel = {"portable", true,          1.0,     1,    nullptr,
                                &Supports,  &ScratchBytes, &Attend, &Read};

}  // namespace wscope
