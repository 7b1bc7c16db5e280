// Weights that are rounded to bfloat16. Included where the instructions are.
#pragma once

#include "simd_softmax.h"

inline uint16_t Round(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline __m512i RoundTwo(Vec low, Vec high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// `lines`: prefetched with each 32 weights.
inline void RoundedSoftmax(const HeadShape& shape, const uint32_t* selected, float* scores,
                           uint16_t* weights, const SoftmaxState& state, int lines,
                           Cursor& cursor) {
  for (int h = 0; h < shape.group; ++h) {
    uint16_t* const row = weights + int64_t{h} * shape.block;
    SoftmaxHead(
        shape, selected, shape.scale * kLog2E, scores + int64_t{h} * shape.block,
        state.o + int64_t{h} * shape.value_dim, state.max + h, state.sum + h,
        [](Vec x) { return RoughExp2(x); },
        [row, lines, &cursor](int i, Vec w, Vec w_2) {
          cursor.Lines(lines);
          _mm512_storeu_si512(row + i, RoundTwo(w, w_2));
        });
  }
}
