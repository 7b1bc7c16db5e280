#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "size_math.h"

namespace wscope {
namespace {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();
constexpr float kLn2 = 0.693147180559945309f;

}  // namespace

std::string CheckShape(const AttentionShape& shape) {
  const std::pair<const char*, int> positive[] = {{"num_q_heads", shape.num_q_heads},
                                                  {"num_kv_heads", shape.num_kv_heads},
                                                  {"key_dim", shape.key_dim},
                                                  {"value_dim", shape.value_dim},
                                                  {"block", shape.block}};
  for (const auto& [name, value] : positive) {
    if (value < 1) {
      return std::string(name) + ": is " + std::to_string(value) + ", must be at least 1";
    }
  }
  if (shape.num_q_heads % shape.num_kv_heads != 0) {
    return "num_q_heads: " + std::to_string(shape.num_q_heads) + " is not a multiple of the " +
           std::to_string(shape.num_kv_heads) + " kv heads";
  }
  if (shape.block % kEntryTile != 0) {
    return "block: is " + std::to_string(shape.block) + ", must be a multiple of " +
           std::to_string(kEntryTile);
  }
  if (!(shape.scale > 0.0f))
    return "scale: is " + std::to_string(shape.scale) + ", must be positive";
  if (shape.value_in_key && shape.value_dim > shape.key_dim) {
    return "value_dim: " + std::to_string(shape.value_dim) + " is more than the key_dim " +
           std::to_string(shape.key_dim) + " that the value is part of";
  }
  if (!CheckedProduct(
          {shape.num_kv_heads, shape.block, shape.stored_dim(), ItemBytes(shape.storage)})) {
    return "block: the bytes of a block overflow 64 bits";
  }
  return {};
}

void CopyToFloat(const void* from, Storage storage, int64_t count, float* to) {
  if (storage == Storage::kFloat32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  const auto* const halves = static_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
    std::memcpy(to + i, &bits, sizeof(bits));
  }
}

HeadShape HeadOf(const AttentionShape& shape) {
  return {shape.group(), shape.key_dim,      shape.value_dim,
          shape.block,   shape.value_in_key, shape.storage == Storage::kBfloat16,
          shape.scale};
}

SoftmaxState StateAt(const AttentionShape& shape, float* memory) {
  float* const max = memory + int64_t{shape.group()} * shape.value_dim;
  return {memory, max, max + shape.group()};
}

void ClearState(const HeadShape& shape, const SoftmaxState& state) {
  std::fill_n(state.o, int64_t{shape.group} * shape.value_dim, 0.0f);
  std::fill_n(state.max, shape.group, kNoScore);
  std::fill_n(state.sum, shape.group, 0.0f);
}

void MergeState(const AttentionShape& shape, const SoftmaxState& from, const SoftmaxState& into) {
  for (int h = 0; h < shape.group(); ++h) {
    const float max = std::max(from.max[h], into.max[h]);
    if (max == kNoScore) continue;  // Both empty: -inf minus -inf would be NaN.
    const float weight_from = std::exp2(from.max[h] - max);
    const float weight_into = std::exp2(into.max[h] - max);
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
    float* const out = o + static_cast<int64_t>(h) * shape.value_dim;
    if (state.max[h] == kNoScore) {
      lse[h] = kNoScore;
      std::fill_n(out, shape.value_dim, 0.0f);
      continue;
    }
    lse[h] = state.max[h] * kLn2 + std::log(state.sum[h]);
    // One division a head: a compiler keeps one a number scalar, 4 us for 16 heads of 512.
    const float inverse = 1.0f / state.sum[h];
    const float* const row = state.o + static_cast<int64_t>(h) * shape.value_dim;
    for (int d = 0; d < shape.value_dim; ++d) out[d] = row[d] * inverse;
  }
}

}  // namespace wscope
