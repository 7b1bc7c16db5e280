// AVX-512 with products of bfloat16 pairs (vdpbf16ps). Twice the products of float32 an
// instruction, but weights and queries are rounded to bfloat16; pays only where the instruction
// runs at full rate (AMD Zen; on Intel it has half of it).
#include <immintrin.h>

#include "kernel.h"

namespace wscope {
namespace {

constexpr auto kPrefetchHint = _MM_HINT_T0;

#include "vec_avx512.h"

constexpr int64_t kPrefetchAhead = 16384;  // Bytes.

#include "attention_simd.h"

constexpr int kPairHeads = 4;  // At once, of a latent block's scores.

inline __m512bh Bits(__m512i x) { return reinterpret_cast<__m512bh>(x); }
inline __m512bh Pairs(const void* from) { return Bits(_mm512_loadu_si512(from)); }
inline __m512bh Pair(uint32_t pair) { return Bits(_mm512_set1_epi32(static_cast<int>(pair))); }
inline Vec Dot(Vec sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }

inline uint32_t Round(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t RoundPair(float low, float high) { return Round(low) | Round(high) << 16; }

// q as the score functions read it: pairs of dims. Grouped: per run of heads [K / 2][heads].
inline void ArrangeKeyPairs(const HeadShape& shape, const float* q, uint32_t* out) {
  ForHeads<kMaxHeads>(shape.group, [&](auto heads, int first) {
    constexpr int kHeads = decltype(heads)::kValue;
    uint32_t* const run = out + int64_t{first} * shape.key_dim / 2;
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const float* const row = q + int64_t{first + h} * shape.key_dim;
      for (int d = 0; d < shape.key_dim; d += 2) {
        run[int64_t{d / 2} * kHeads + h] = RoundPair(row[d], row[d + 1]);
      }
    }
  });
}

// Latent: per run of heads [tiles][heads][8 pairs, each twice].
inline void ArrangeLatentPairs(const HeadShape& shape, const float* q, uint32_t* out) {
  ForHeads<kPairHeads>(shape.group, [&](auto heads, int first) {
    constexpr int kHeads = decltype(heads)::kValue;
    uint32_t* const run = out + int64_t{first} * shape.key_dim;
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const float* const row = q + int64_t{first + h} * shape.key_dim;
      for (int d = 0; d < shape.key_dim; ++d) {
        const int even = d - d % 2;
        run[(int64_t{d / kLanes} * kHeads + h) * kLanes + d % kLanes] =
            RoundPair(row[even], row[even + 1]);
      }
    }
  });
}

// Scores of two groups of 16 entries.
template <int kHeads, bool kFetch>
inline void KeyPairScores(const uint8_t* keys, const uint32_t* q, int key_dim, float* scores,
                          int64_t stride, Cursor& cursor) {
  const uint8_t* a = keys;
  const uint8_t* b = keys + int64_t{kLanes} * key_dim * 2;
  Vec sum_a[kHeads], sum_b[kHeads];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) sum_a[h] = sum_b[h] = Zero();
  for (int d = 0; d < key_dim; d += 2, a += 64, b += 64, q += kHeads) {
    if (kFetch) cursor.Lines(2);
    const __m512bh row_a = Pairs(a), row_b = Pairs(b);
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const __m512bh pair = Pair(q[h]);
      sum_a[h] = Dot(sum_a[h], row_a, pair);
      sum_b[h] = Dot(sum_b[h], row_b, pair);
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
    Store(scores + h * stride, sum_a[h]);
    Store(scores + h * stride + kLanes, sum_b[h]);
  }
}

// Halves the number of vectors: sums of pairs of 128-bit lanes of x, then of y.
inline Vec FoldLanes(Vec x, Vec y) {
  return Add(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}
// Sums of pairs of 64-bit lanes: per 128 bits one of x, one of y.
inline Vec FoldHalves(Vec x, Vec y) {
  const __m512d a = _mm512_castps_pd(x), b = _mm512_castps_pd(y);
  return Add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}

// Scores of the 32 entries of a latent tile. A row holds 16 dims of two entries; its 16-bit numbers
// are put in pairs of dims, so that lane 2 i has dims (2 i, 2 i + 1) of the first entry and lane
// 2 i + 1 those of the second. Four rows and four heads at a time: a load for each two products.
template <int kHeads, bool kFetch>
inline void LatentPairScores(const uint8_t* chunk, const uint32_t* q, int key_dim, int lines,
                             float* scores, int64_t stride, Cursor& cursor) {
  constexpr int kRows = 4;
  const __m512i swap =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  for (int row = 0; row < kEntryTile / 2; row += kRows) {
    Vec sums[kHeads][kRows];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[h][r] = Zero();
    }
    const uint8_t* at = chunk + row * 64;
    const uint32_t* q_tile = q;
    if (kFetch) cursor.Lines(2 * lines);
    for (int tile = 0; tile < key_dim / kLanes; ++tile, at += 1024, q_tile += kHeads * kLanes) {
      __m512bh x[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        x[r] = Bits(_mm512_shuffle_epi8(_mm512_loadu_si512(at + 64 * r), swap));
      }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        const __m512bh pairs = Pairs(q_tile + h * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sums[h][r] = Dot(sums[h][r], x[r], pairs);
      }
    }
    float* const out = scores + 2 * row;  // 8 entries a head
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      const Vec x = FoldHalves(sums[h][0], sums[h][1]);
      const Vec y = FoldHalves(sums[h][2], sums[h][3]);
      const Vec half = FoldLanes(x, y);
      const Vec all = FoldLanes(half, half);
      _mm256_storeu_ps(out + h * stride, _mm512_castps512_ps256(all));
    }
  }
}

// o[h][dims of kTiles tiles] += weights[h] * values over the 32 entries of a chunk.
template <int kHeads, int kTiles, int kLines>
inline void AddPairValues(const uint8_t* tile, const uint16_t* weights, int64_t stride, float* o,
                          int64_t o_stride, Cursor& cursor) {
  Vec sums[kHeads][kTiles];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) sums[h][t] = Load(o + h * o_stride + t * kLanes);
  }
  for (int row = 0; row < kEntryTile / 2; ++row, tile += 64) {
    if (kLines > 0) cursor.Lines(kLines);
    __m512bh value[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) value[t] = Pairs(tile + t * 1024);
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      uint32_t bits;
      __builtin_memcpy(&bits, weights + h * stride + 2 * row, sizeof(bits));
      const __m512bh pair = Pair(bits);
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) sums[h][t] = Dot(sums[h][t], value[t], pair);
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) Store(o + h * o_stride + t * kLanes, sums[h][t]);
  }
}

template <int kVisits>
inline void ChunkPairValues(const HeadShape& shape, const uint8_t* tiles, int dims,
                            const uint16_t* weights, float* o, Cursor& cursor) {
  ForHeads<kMaxHeads>(shape.group, [&](auto heads, int first) {
    constexpr int kHeads = decltype(heads)::kValue;
    constexpr int kTiles = kHeads == kMaxHeads ? 2 : 4;
    const uint16_t* const w = weights + int64_t{first} * shape.block;
    float* const out = o + int64_t{first} * shape.value_dim;
    int d = 0;
    for (; d + kTiles * kLanes <= dims; d += kTiles * kLanes) {
      const uint8_t* const at = tiles + d * 64;
      if (first == 0) {
        AddPairValues<kHeads, kTiles, kTiles / kVisits>(at, w, shape.block, out + d,
                                                        shape.value_dim, cursor);
      } else {
        AddPairValues<kHeads, kTiles, 0>(at, w, shape.block, out + d, shape.value_dim, cursor);
      }
    }
    for (; d < dims; d += kLanes) {
      AddPairValues<kHeads, 1, 0>(tiles + d * 64, w, shape.block, out + d, shape.value_dim, cursor);
    }
  });
}

inline void PairScores(const HeadShape& shape, const uint8_t* head, const uint32_t* q,
                       const uint32_t* selected, float* scores, Cursor& cursor) {
  // Lines that the values pass of a latent block does not prefetch, for each 4 entries.
  const int lines = 2 * (shape.key_dim / kLanes) - shape.value_dim / kLanes;
  for (int entry = 0; entry < shape.block; entry += kEntryTile) {
    const uint8_t* const at = head + int64_t{entry} * shape.key_dim * 2;
    if (selected && selected[entry / kEntryTile] == 0) continue;
    const auto latent = [&](auto heads, int first) {
      constexpr int kHeads = decltype(heads)::kValue;
      const uint32_t* const run = q + int64_t{first} * shape.key_dim;
      float* const out = scores + int64_t{first} * shape.block + entry;
      if (first == 0) {
        LatentPairScores<kHeads, true>(at, run, shape.key_dim, lines, out, shape.block, cursor);
      } else {
        LatentPairScores<kHeads, false>(at, run, shape.key_dim, 0, out, shape.block, cursor);
      }
    };
    const auto grouped = [&](auto heads, int first) {
      constexpr int kHeads = decltype(heads)::kValue;
      const uint32_t* const run = q + int64_t{first} * shape.key_dim / 2;
      float* const out = scores + int64_t{first} * shape.block + entry;
      if (first == 0) {
        KeyPairScores<kHeads, true>(at, run, shape.key_dim, out, shape.block, cursor);
      } else {
        KeyPairScores<kHeads, false>(at, run, shape.key_dim, out, shape.block, cursor);
      }
    };
    if (shape.value_in_key) {
      ForHeads<kPairHeads>(shape.group, latent);
    } else {
      ForHeads<kMaxHeads>(shape.group, grouped);
    }
    cursor.Wrap();
  }
}

template <int kVisits>
inline void PairValues(const HeadShape& shape, const uint8_t* values, int stored_dim, int panel,
                       const uint32_t* selected, const uint16_t* weights, float* o,
                       Cursor& cursor) {
  for (int first = 0; first < shape.value_dim; first += panel) {
    const int stored = stored_dim - first < panel ? stored_dim - first : panel;
    const int dims = shape.value_dim - first < panel ? shape.value_dim - first : panel;
    const uint8_t* chunk = values + int64_t{first} * shape.block * 2;
    for (int entry = 0; entry < shape.block; entry += kEntryTile) {
      if (!selected || selected[entry / kEntryTile] != 0) {
        for (int d = 0; d < dims; d += kPanelDims) {
          ChunkPairValues<kVisits>(shape, chunk + d * 64,
                                   dims - d < kPanelDims ? dims - d : kPanelDims, weights + entry,
                                   o + first + d, cursor);
        }
        cursor.Wrap();
      }
      chunk += int64_t{kEntryTile} * stored * 2;
    }
  }
}

inline void PairSoftmax(const HeadShape& shape, const uint32_t* selected, float* scores,
                        uint16_t* weights, const SoftmaxState& state) {
  for (int h = 0; h < shape.group; ++h) {
    uint16_t* const row = weights + int64_t{h} * shape.block;
    SoftmaxHead(
        shape, selected, shape.scale * kLog2E, scores + int64_t{h} * shape.block,
        state.o + int64_t{h} * shape.value_dim, state.max + h, state.sum + h,
        [](Vec x) { return RoughExp2(x); },
        [row](int i, Vec w, Vec w_2) {
          _mm512_storeu_si512(row + i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(w_2, w)));
        });
  }
}

inline bool Supports(const HeadShape& shape) {
  if (!shape.bfloat16 || shape.value_dim % kLanes != 0) return false;
  return shape.value_in_key ? shape.key_dim % kLanes == 0 : shape.key_dim % 2 == 0;
}

inline int64_t ScratchBytes(const HeadShape& shape) {
  const int64_t q = RoundUp(int64_t{shape.group} * shape.key_dim, kLanes);
  const int64_t scores = int64_t{shape.group} * shape.block;
  return 4 * q + 4 * scores + 2 * scores;
}

inline void PairAttend(const HeadShape& shape, const float* q, const HeadBlocks& blocks,
                       void* scratch, const SoftmaxState& state) {
  auto* const q_pairs = static_cast<uint32_t*>(scratch);
  auto* const scores =
      static_cast<float*>(scratch) + RoundUp(int64_t{shape.group} * shape.key_dim, kLanes);
  auto* const weights = reinterpret_cast<uint16_t*>(scores + int64_t{shape.group} * shape.block);
  if (shape.value_in_key) {
    ArrangeLatentPairs(shape, q, q_pairs);
  } else {
    ArrangeKeyPairs(shape, q, q_pairs);
  }
  for (int i = 0; i < blocks.num_blocks; ++i) {
    const uint32_t* const selected =
        blocks.selected ? blocks.selected + int64_t{i} * (shape.block / 32) : nullptr;
    if (!AnySelected(shape, selected)) continue;
    const uint8_t* const head = blocks.blocks[i] + blocks.head_offset;
    Cursor cursor = MakeCursor(shape, blocks, i);
    PairScores(shape, head, q_pairs, selected, scores, cursor);
    PairSoftmax(shape, selected, scores, weights, state);
    if (shape.value_in_key) {
      PairValues<2>(shape, head, shape.key_dim, shape.key_dim, selected, weights, state.o, cursor);
    } else {
      PairValues<1>(shape, head + int64_t{shape.block} * shape.key_dim * 2, shape.value_dim,
                    kPanelDims, selected, weights, state.o, cursor);
    }
  }
}

}  // namespace

const Kernel kAvx512Bf16Kernel = {"avx512_bf16", false,         0.85,        8,    &kAvx512Kernel,
                                  &Supports,     &ScratchBytes, &PairAttend, &Read};

}  // namespace wscope
