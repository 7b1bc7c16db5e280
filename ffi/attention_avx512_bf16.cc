// AVX-512 with products of bfloat16 pairs (vdpbf16ps). Twice the products of float32 an
// instruction, but weights and queries are rounded to bfloat16; pays only where the instruction
// runs at full rate (AMD Zen; on Intel it has half of it).
#include <immintrin.h>

#include "kernel.h"

namespace wscope {
namespace {

#include "vec_avx512.h"

constexpr int64_t kPrefetchAhead = 8192;  // Bytes.
constexpr int kPrefetchPages = 1;

#include "attention_simd.h"
#include "simd_rounded.h"

constexpr int kPairHeads = 4;  // At once, of a latent block's scores.

inline __m512bh Bits(__m512i x) { return reinterpret_cast<__m512bh>(x); }
inline __m512bh Pairs(const void* from) { return Bits(_mm512_loadu_si512(from)); }
inline __m512bh Pair(uint32_t pair) { return Bits(_mm512_set1_epi32(static_cast<int>(pair))); }
inline Vec Dot(Vec sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }

inline uint32_t RoundPair(float low, float high) {
  return Round(low) | static_cast<uint32_t>(Round(high)) << 16;
}
// 8 pairs of the next 16 numbers.
inline __m256i RoundPairs(const float* from) {
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(Load(from)));
}

// q as the score functions read it: pairs of dims. Grouped: per run of heads [K / 2][heads].
inline void ArrangeKeyPairs(const HeadShape& shape, const float* q, uint32_t* out) {
  ForHeads<kMaxHeads>(shape.group, [&](auto heads, int first) {
    constexpr int kHeads = decltype(heads)::kValue;
    uint32_t* const run = out + int64_t{first} * shape.key_dim / 2;
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const float* const row = q + int64_t{first + h} * shape.key_dim;
      uint32_t* at = run + h;
      int d = 0;
      for (; d + kLanes <= shape.key_dim; d += kLanes) {
        alignas(32) uint32_t pairs[kLanes / 2];
        _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), RoundPairs(row + d));
        for (int i = 0; i < kLanes / 2; ++i, at += kHeads) *at = pairs[i];
      }
      for (; d < shape.key_dim; d += 2, at += kHeads) *at = RoundPair(row[d], row[d + 1]);
    }
  });
}

// Latent: per run of heads [tiles][heads][8 pairs, each twice].
inline void ArrangeLatentPairs(const HeadShape& shape, const float* q, uint32_t* out) {
  const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  ForHeads<kPairHeads>(shape.group, [&](auto heads, int first) {
    constexpr int kHeads = decltype(heads)::kValue;
    uint32_t* const run = out + int64_t{first} * shape.key_dim;
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const float* const row = q + int64_t{first + h} * shape.key_dim;
      for (int d = 0; d < shape.key_dim; d += kLanes) {
        const __m512i pairs = _mm512_castsi256_si512(RoundPairs(row + d));
        _mm512_storeu_si512(run + int64_t{d} * kHeads + h * kLanes,
                            _mm512_permutexvar_epi32(twice, pairs));
      }
    }
  });
}

// Scores of two groups of 16 entries, one after the other: rows in the order of memory, in two sums
// a head so that products need not wait for each other.
template <int kHeads, bool kFetch>
inline void KeyPairScores(const HeadShape& shape, const uint8_t* keys, const uint32_t* q,
                          float* scores, Cursor& cursor) {
  const int rows = shape.key_dim / 2;
  for (int group = 0; group < kEntryTile; group += kLanes) {
    Vec even[kHeads], odd[kHeads];
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) even[h] = odd[h] = Zero();
    const uint32_t* at = q;
    int row = 0;
    for (; row + 2 <= rows; row += 2, keys += 128, at += 2 * kHeads) {
      if (kFetch) cursor.Lines(2);
      const __m512bh a = Pairs(keys), b = Pairs(keys + 64);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        even[h] = Dot(even[h], a, Pair(at[h]));
        odd[h] = Dot(odd[h], b, Pair(at[kHeads + h]));
      }
    }
    if (row < rows) {
      const __m512bh last = Pairs(keys);
      keys += 64;
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) even[h] = Dot(even[h], last, Pair(at[h]));
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      Store(scores + int64_t{h} * shape.block + group, Add(even[h], odd[h]));
    }
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
inline void LatentPairScores(const HeadShape& shape, const uint8_t* chunk, const uint32_t* q,
                             float* scores, Cursor& cursor) {
  constexpr int kRows = 4;
  const int key_dim = shape.key_dim;
  const int64_t stride = shape.block;
  // Those that the values pass does not prefetch, for each 4 entries.
  const int lines = 2 * (key_dim / kLanes) - shape.value_dim / kLanes;
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
template <int kHeads, int kTiles, int kLines, bool kLatent>
inline void AddPairValues(const uint8_t* tile, const uint16_t* weights, int64_t stride, float* o,
                          int64_t o_stride, Cursor& cursor) {
  Vec sums[kHeads][kTiles];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) sums[h][t] = Load(o + h * o_stride + t * kLanes);
  }
  for (int row = 0; row < kEntryTile / 2; ++row, tile += 64) {
    if (kLines > 0 && (kLatent || !IsSpareRow(row))) cursor.Lines(kLines);
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

// See attention_simd.h.
struct PairNumbers {
  using Query = uint32_t;
  using Weight = uint16_t;
  static constexpr int kItem = 2;
  static constexpr int kLatentRun = kPairHeads;
  static constexpr bool kParts = false;

  // Pairs of dims; of latent tiles each twice.
  static int64_t QuerySize(const HeadShape& shape) {
    return int64_t{shape.group} * shape.key_dim / (shape.value_in_key ? 1 : 2);
  }
  static void ArrangeKeys(const HeadShape& shape, const float* q, Query* out) {
    ArrangeKeyPairs(shape, q, out);
  }
  static void ArrangeLatent(const HeadShape& shape, const float* q, Query* out) {
    ArrangeLatentPairs(shape, q, out);
  }
  static void Weigh(const HeadShape& shape, const uint32_t* selected, float* scores,
                    Weight* weights, const SoftmaxState& state, Cursor& cursor) {
    RoundedSoftmax(shape, selected, scores, weights, state, SoftmaxLines(shape), cursor);
  }
  template <int kHeads, bool kFetch, typename... Args>
  static void OfKeys(Args&&... args) {
    KeyPairScores<kHeads, kFetch>(args...);
  }
  template <int kHeads, bool kFetch, typename... Args>
  static void OfLatent(Args&&... args) {
    LatentPairScores<kHeads, kFetch>(args...);
  }
  template <int kHeads, int kTiles, int kLines, bool kLatent, typename... Args>
  static void Values(Args&&... args) {
    AddPairValues<kHeads, kTiles, kLines, kLatent>(args...);
  }
};

inline bool Supports(const HeadShape& shape) {
  if (!shape.bfloat16 || shape.value_dim % kLanes != 0) return false;
  return shape.value_in_key ? shape.key_dim % kLanes == 0 : shape.key_dim % 2 == 0;
}

inline int64_t ScratchBytes(const HeadShape& shape) { return ScratchSize<PairNumbers>(shape); }

inline void PairAttend(const HeadShape& shape, const float* q, const HeadBlocks& blocks,
                       void* scratch, const SoftmaxState& state) {
  AttendWith<PairNumbers>(shape, q, blocks, scratch, state);
}

}  // namespace

const Kernel kAvx512Bf16Kernel = {"avx512_bf16", false,         0.85,        8,    &kAvx512Kernel,
                                  &Supports,     &ScratchBytes, &PairAttend, &Read};

}  // namespace wscope
