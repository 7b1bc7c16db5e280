// Arithmetic in float32: what attention_simd.h needs of numbers, for entries in bfloat16 (widened)
// and in float32. The file has defined
//   kMaxHeads (at once), kLatentHeads, kValueTiles (at kMaxHeads; twice as many for fewer heads)
//   kKeySums, of scores of keys at once; Sum, what products of vectors add up in
#pragma once

#include "attention_simd.h"

// Two dims of 16 entries, in bfloat16 one row.
template <bool kBf16>
inline void LoadTwo(const uint8_t* from, Vec* a, Vec* b) {
  if constexpr (kBf16) {
    *a = Even(from);
    *b = Odd(from);
  } else {
    *a = Load(reinterpret_cast<const float*>(from));
    *b = Load(reinterpret_cast<const float*>(from + 64));
  }
}

// Scores, not scaled, of two groups of 16 entries, one after the other: rows in the order of
// memory, in two sums a head, where registers suffice, so that products need not wait for each
// other. q: [K][kHeads].
template <bool kBf16, int kHeads, bool kFetch>
inline void KeyScores(const HeadShape& shape, const uint8_t* keys, const float* q, float* scores,
                      Cursor& cursor) {
  constexpr int kLines = kBf16 ? 1 : 2;  // Of two dims.
  constexpr bool kApart = 2 * kHeads <= kKeySums;
  for (int group = 0; group < kEntryTile; group += kLanes) {
    Vec even[kHeads], apart[kHeads];
    Vec* const odd = kApart ? apart : even;
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) even[h] = odd[h] = Zero();
    const float* at = q;
    int d = 0;
    for (; d + 2 <= shape.key_dim; d += 2, keys += 64 * kLines, at += 2 * kHeads) {
      if (kFetch) cursor.Lines(kLines);
      Vec a, b;
      LoadTwo<kBf16>(keys, &a, &b);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        even[h] = Fma(Set1(at[h]), a, even[h]);
        odd[h] = Fma(Set1(at[kHeads + h]), b, odd[h]);
      }
    }
    if (d < shape.key_dim) {
      const Vec last = kBf16 ? LoadHalves(keys) : Load(reinterpret_cast<const float*>(keys));
      keys += 32 * kLines;
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) even[h] = Fma(Set1(at[h]), last, even[h]);
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      Store(scores + int64_t{h} * shape.block + group, kApart ? Add(even[h], odd[h]) : even[h]);
    }
  }
}

// The dims of a tile of two entries, of which `dims` are stored if kPart.
template <bool kBf16, bool kPart>
inline void LoadEntries(const uint8_t* row, int dims, Vec* x) {
  if constexpr (kBf16) {
    x[0] = kPart ? EvenPart(row, dims) : Even(row);
    x[1] = kPart ? OddPart(row, dims) : Odd(row);
  } else {
    const auto* const floats = reinterpret_cast<const float*>(row);
    x[0] = kPart ? LoadPart(floats, dims) : Load(floats);
    x[1] = kPart ? LoadPart(floats + dims, dims) : Load(floats + kLanes);
  }
}

// Scores of the 32 entries of a latent tile for kHeads heads. q: [tiles][kHeads][16], zeros behind
// K.
template <bool kBf16, int kHeads, bool kFetch>
inline void LatentScores(const HeadShape& shape, const uint8_t* chunk, const float* q,
                         float* scores, Cursor& cursor) {
  constexpr int kItem = kBf16 ? 2 : 4;
  constexpr int kRows = 2;  // Entries at a time.
  const int full = shape.key_dim / kLanes;
  const int rest = shape.key_dim % kLanes;
  // The values pass prefetches one line for each two that it reads again (none with tiles one at a
  // time, which arithmetic binds); here come the others.
  const int lines = (full - shape.value_dim / kLanes / 2) * kItem / 2;
  for (int entry = 0; entry < kEntryTile; entry += kRows) {
    Sum sums[kHeads][kRows];
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) sums[h][0] = sums[h][1] = Sum{};
    const float* q_tile = q;
    const auto add = [&](const Vec* x) {
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h, q_tile += kLanes) {
        const Vec q_h = Load(q_tile);
        sums[h][0] = AddProduct(q_h, x[0], sums[h][0]);
        sums[h][1] = AddProduct(q_h, x[1], sums[h][1]);
      }
    };
    if (kFetch) cursor.Lines(lines);
    const uint8_t* row = chunk + int64_t{entry} * kLanes * kItem;
    Vec x[kRows];
#pragma GCC unroll 2
    for (int tile = 0; tile < full; ++tile, row += int64_t{kEntryTile} * kLanes * kItem) {
      LoadEntries<kBf16, false>(row, kLanes, x);
      add(x);
    }
    if (rest > 0) {
      LoadEntries<kBf16, true>(row - int64_t{entry} * (kLanes - rest) * kItem, rest, x);
      add(x);
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      float* const out = scores + int64_t{h} * shape.block + entry;
      out[0] = ReduceAdd(sums[h][0]);
      out[1] = ReduceAdd(sums[h][1]);
    }
  }
}

// o[h][dims of kTiles tiles] += weights[h] * values, over the 32 entries of a chunk. Where kPart,
// it is one tile of `width` dims, of which the first `dims` are values.
template <bool kBf16, int kHeads, int kTiles, bool kPart, int kLines, bool kLatent>
inline void AddValues(const uint8_t* tile, int width, int dims, const float* weights,
                      int64_t stride, float* o, int64_t o_stride, Cursor& cursor) {
  constexpr int kItem = kBf16 ? 2 : 4;
  constexpr int kPair = kBf16 ? 2 : 1;
  constexpr int64_t kTileBytes = int64_t{kEntryTile} * kLanes * kItem;
  const int64_t row_bytes = int64_t{kPart ? width : kLanes} * kItem * kPair;
  Vec sums[kHeads][kTiles];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
      float* const at = o + h * o_stride + t * kLanes;
      sums[h][t] = kPart ? LoadPart(at, dims) : Load(at);
    }
  }
  for (int entry = 0; entry < kEntryTile; entry += kPair, tile += row_bytes) {
    if (kLines > 0 && (kLatent || !IsSpareRow(entry / kPair))) cursor.Lines(kLines);
    for (int side = 0; side < kPair; ++side) {
      Vec value[kTiles];
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) {
        const uint8_t* const row = tile + t * kTileBytes;
        if constexpr (!kBf16) {
          const auto* const floats = reinterpret_cast<const float*>(row);
          value[t] = kPart ? LoadPart(floats, dims) : Load(floats);
        } else if (kPart) {
          value[t] = side == 0 ? EvenPart(row, dims) : OddPart(row, dims);
        } else {
          value[t] = side == 0 ? Even(row) : Odd(row);
        }
      }
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const Vec weight = Set1(weights[h * stride + entry + side]);
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; ++t) sums[h][t] = Fma(weight, value[t], sums[h][t]);
      }
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
      float* const at = o + h * o_stride + t * kLanes;
      if (kPart) {
        StorePart(at, sums[h][t], dims);
      } else {
        Store(at, sums[h][t]);
      }
    }
  }
}

// Turns q [R, K] into what the score functions read: per run of heads [K][heads].
inline void ArrangeKeyQuery(const HeadShape& shape, const float* q, float* out) {
  ForHeads<kMaxHeads>(shape.group, [&](auto heads, int first) {
    constexpr int kHeads = decltype(heads)::kValue;
    float* const run = out + int64_t{first} * shape.key_dim;
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const float* const row = q + int64_t{first + h} * shape.key_dim;
      for (int d = 0; d < shape.key_dim; ++d) run[int64_t{d} * kHeads + h] = row[d];
    }
  });
}

// The same for latent tiles: per run of heads [tiles][heads][16], zeros behind K.
inline void ArrangeLatentQuery(const HeadShape& shape, const float* q, float* out) {
  const int64_t padded = RoundUp(shape.key_dim, kLanes);
  ForHeads<kLatentHeads>(shape.group, [&](auto heads, int first) {
    constexpr int kHeads = decltype(heads)::kValue;
    float* const run = out + first * padded;
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const float* const row = q + int64_t{first + h} * shape.key_dim;
      for (int d = 0; d < padded; ++d) {
        run[(int64_t{d / kLanes} * kHeads + h) * kLanes + d % kLanes] =
            d < shape.key_dim ? row[d] : 0.0f;
      }
    }
  });
}

template <bool kBf16>
struct FloatNumbers {
  using Query = float;
  using Weight = float;
  static constexpr int kItem = kBf16 ? 2 : 4;
  static constexpr int kLatentRun = kLatentHeads;
  static constexpr bool kParts = true;  // Takes dims that fill no whole tile.

  static int64_t QuerySize(const HeadShape& shape) {
    return shape.group * (shape.value_in_key ? RoundUp(shape.key_dim, kLanes) : shape.key_dim);
  }
  static void ArrangeKeys(const HeadShape& shape, const float* q, Query* out) {
    ArrangeKeyQuery(shape, q, out);
  }
  static void ArrangeLatent(const HeadShape& shape, const float* q, Query* out) {
    ArrangeLatentQuery(shape, q, out);
  }
  static void Weigh(const HeadShape& shape, const uint32_t* selected, float* scores, Weight*,
                    const SoftmaxState& state, Cursor& cursor) {
    Softmax(shape, selected, scores, state, cursor);
  }
  template <int kHeads, bool kFetch, typename... Args>
  static void OfKeys(Args&&... args) {
    KeyScores<kBf16, kHeads, kFetch>(args...);
  }
  template <int kHeads, bool kFetch, typename... Args>
  static void OfLatent(Args&&... args) {
    LatentScores<kBf16, kHeads, kFetch>(args...);
  }
  template <int kHeads, int kTiles, int kLines, bool kLatent, typename... Args>
  static void Values(const uint8_t* tiles, Args&&... args) {
    AddValues<kBf16, kHeads, kTiles, false, kLines, kLatent>(tiles, kLanes, kLanes, args...);
  }
  template <int kHeads, typename... Args>
  static void PartValues(const uint8_t* tile, int width, int dims, Args&&... args) {
    AddValues<kBf16, kHeads, 1, true, 0, false>(tile, width, dims, args...);
  }
};

// The rest of a kernel that takes every shape and both types.
inline int64_t FloatScratchBytes(const HeadShape& shape) {
  return ScratchSize<FloatNumbers<true>>(shape);
}

inline void AttendInFloat(const HeadShape& shape, const float* q, const HeadBlocks& blocks,
                          void* scratch, const SoftmaxState& state) {
  if (shape.bfloat16) {
    AttendWith<FloatNumbers<true>>(shape, q, blocks, scratch, state);
  } else {
    AttendWith<FloatNumbers<false>>(shape, q, blocks, scratch, state);
  }
}

inline bool SupportsAll(const HeadShape&) { return true; }
