// The shape of a layer's decode attention, and the running softmax that kernels add to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernel.h"

namespace wscope {

enum class Storage { kFloat32, kBfloat16 };

inline int64_t ItemBytes(Storage storage) { return storage == Storage::kFloat32 ? 4 : 2; }

// What a kernel needs to know of a layer. Letters of shapes: H query heads, G kv heads, K key dim,
// V value dim, D entries of a block.
struct AttentionShape {
  int num_q_heads = 0;        // H, a multiple of G. Query head h reads kv head h / (H / G).
  int num_kv_heads = 0;       // G
  int key_dim = 0;            // K
  int value_dim = 0;          // V, at most K if value_in_key.
  bool value_in_key = false;  // The value of an entry is the first V numbers of its key.
  int block = 0;              // D, a multiple of 32.
  Storage storage = Storage::kFloat32;
  float scale = 1.0f;  // Applied in float32 to the scores, never to q.

  int group() const { return num_q_heads / num_kv_heads; }
  int64_t stored_dim() const { return int64_t{key_dim} + (value_in_key ? 0 : value_dim); }
  int64_t head_bytes() const { return block * stored_dim() * ItemBytes(storage); }
  int64_t block_bytes() const { return num_kv_heads * head_bytes(); }
  // Floats of the running softmax of a kv head's query heads.
  int64_t state_size() const { return int64_t{group()} * (value_dim + 2); }
};

// Empty if the numbers make sense and a block's size fits 64 bits; else what is wrong, beginning
// with the field's name.
std::string CheckShape(const AttentionShape& shape);

// Widens `count` numbers.
void CopyToFloat(const void* from, Storage storage, int64_t count, float* to);

// The part of the shape that a kernel sees.
HeadShape HeadOf(const AttentionShape& shape);

// The state that lies in `memory`, [state_size].
SoftmaxState StateAt(const AttentionShape& shape, float* memory);

void ClearState(const HeadShape& shape, const SoftmaxState& state);

// Adds the entries of `from` to `into`. Two empty states make an empty one.
void MergeState(const AttentionShape& shape, const SoftmaxState& from, const SoftmaxState& into);

// o = softmax-weighted mean of the values, lse = natural log of the sum of exp(score); 0 and -inf
// for no entry.
void FinishState(const AttentionShape& shape, const SoftmaxState& state,
                 float* o,     // [H / G, V]
                 float* lse);  // [H / G]

}  // namespace wscope
