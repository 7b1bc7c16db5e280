// Decode attention on vectors of 16 floats, over what Numbers knows of the arithmetic (FloatNumbers
// in simd_float.h, PairNumbers in attention_avx512_bf16.cc). Included inside the anonymous
// namespace of a file of one instruction set.
#pragma once

#include "simd_softmax.h"

// All scores of a block.
template <typename Numbers, bool kLatent>
inline void BlockScores(const HeadShape& shape, const uint8_t* head,
                        const typename Numbers::Query* q, const uint32_t* selected, float* scores,
                        Cursor& cursor) {
  constexpr int kMost = kLatent ? Numbers::kLatentRun : kMaxHeads;
  const int64_t chunk_bytes = int64_t{kEntryTile} * shape.key_dim * Numbers::kItem;
  const int64_t q_size = Numbers::QuerySize(shape) / shape.group;
  for (int entry = 0; entry < shape.block; entry += kEntryTile, head += chunk_bytes) {
    if (selected && selected[entry / kEntryTile] == 0) continue;
    ForHeads<kMost>(shape.group, [&](auto heads, int first) {
      constexpr int kHeads = decltype(heads)::kValue;
      const auto* const run = q + first * q_size;
      float* const out = scores + int64_t{first} * shape.block + entry;
      const auto score = [&](auto fetch) {
        constexpr bool kFetch = decltype(fetch)::kValue != 0;
        if constexpr (kLatent) {
          Numbers::template OfLatent<kHeads, kFetch>(shape, head, run, out, cursor);
        } else {
          Numbers::template OfKeys<kHeads, kFetch>(shape, head, run, out, cursor);
        }
      };
      if (first == 0) {
        score(Heads<1>{});
      } else {
        score(Heads<0>{});
      }
    });
  }
}

// Adds the values of one chunk of 32 entries in up to 64 dims, of `stored` from there on. A latent
// block's were read by the scores too: half of the lines are left to prefetch.
template <typename Numbers, bool kLatent>
inline void ChunkValues(const HeadShape& shape, const uint8_t* tiles, int stored, int dims,
                        const typename Numbers::Weight* weights, float* o, Cursor& cursor) {
  constexpr int64_t kTileBytes = int64_t{kEntryTile} * kLanes * Numbers::kItem;
  ForHeads<kMaxHeads>(shape.group, [&](auto heads, int first) {
    constexpr int kHeads = decltype(heads)::kValue;
    constexpr int kTiles = kHeads <= kMaxHeads / 2 ? 2 * kValueTiles : kValueTiles;
    constexpr int kLines = kTiles / (kLatent ? 2 : 1);
    const auto* const w = weights + int64_t{first} * shape.block;
    float* const out = o + int64_t{first} * shape.value_dim;
    const int64_t o_stride = shape.value_dim;
    const int64_t stride = shape.block;
    int d = 0;
    for (; d + kTiles * kLanes <= dims; d += kTiles * kLanes) {
      const uint8_t* const at = tiles + d / kLanes * kTileBytes;
      if (first > 0) {
        Numbers::template Values<kHeads, kTiles, 0, kLatent>(at, w, stride, out + d, o_stride,
                                                             cursor);
      } else {
        Numbers::template Values<kHeads, kTiles, kLines, kLatent>(at, w, stride, out + d, o_stride,
                                                                  cursor);
      }
    }
    for (; d + kLanes <= dims; d += kLanes) {
      Numbers::template Values<kHeads, 1, 0, kLatent>(tiles + d / kLanes * kTileBytes, w, stride,
                                                      out + d, o_stride, cursor);
    }
    if constexpr (Numbers::kParts) {
      if (d < dims) {
        const int width = stored - d < kLanes ? stored - d : kLanes;
        Numbers::template PartValues<kHeads>(tiles + d / kLanes * kTileBytes, width, dims - d, w,
                                             stride, out + d, o_stride, cursor);
      }
    }
  });
}

// Adds the values of a block; a latent one is a single panel, of which the first value_dim are
// values.
template <typename Numbers, bool kLatent>
inline void BlockValues(const HeadShape& shape, const uint8_t* values, const uint32_t* selected,
                        const typename Numbers::Weight* weights, float* o, Cursor& cursor) {
  const int stored_dim = kLatent ? shape.key_dim : shape.value_dim;
  const int panel = kLatent ? shape.key_dim : kPanelDims;
  for (int first = 0; first < shape.value_dim; first += panel) {
    const int stored = stored_dim - first < panel ? stored_dim - first : panel;
    const int dims = shape.value_dim - first < panel ? shape.value_dim - first : panel;
    const uint8_t* chunk = values + int64_t{first} * shape.block * Numbers::kItem;
    for (int entry = 0; entry < shape.block; entry += kEntryTile) {
      if (!selected || selected[entry / kEntryTile] != 0) {
        // All heads meet 64 dims while these are in the first-level cache.
        for (int d = 0; d < dims; d += kPanelDims) {
          ChunkValues<Numbers, kLatent>(shape, chunk + int64_t{d} * kEntryTile * Numbers::kItem,
                                        stored - d, dims - d < kPanelDims ? dims - d : kPanelDims,
                                        weights + entry, o + first + d, cursor);
        }
      }
      chunk += int64_t{kEntryTile} * stored * Numbers::kItem;
    }
  }
}

// What lies in a kernel's scratch. Where weights are float they take the place of the scores.
template <typename Numbers>
struct Scratch {
  typename Numbers::Query* q;
  float* scores;                      // [R, D]
  typename Numbers::Weight* weights;  // [R, D]
};

template <typename Numbers>
inline int64_t ScratchSize(const HeadShape& shape) {
  const int64_t numbers = int64_t{shape.group} * shape.block;
  const bool apart = sizeof(typename Numbers::Weight) != sizeof(float);
  return 4 * (RoundUp(Numbers::QuerySize(shape), kLanes) + RoundUp(numbers, kLanes)) +
         (apart ? numbers * static_cast<int64_t>(sizeof(typename Numbers::Weight)) : 0);
}

template <typename Numbers>
inline Scratch<Numbers> MakeScratch(const HeadShape& shape, void* memory) {
  using Weight = typename Numbers::Weight;
  auto* const q = static_cast<typename Numbers::Query*>(memory);
  static_assert(sizeof(*q) == sizeof(float));
  float* const scores = static_cast<float*>(memory) + RoundUp(Numbers::QuerySize(shape), kLanes);
  const bool apart = sizeof(Weight) != sizeof(float);
  float* const behind = scores + (apart ? RoundUp(int64_t{shape.group} * shape.block, kLanes) : 0);
  return {q, scores, reinterpret_cast<Weight*>(behind)};
}

template <typename Numbers, bool kLatent>
inline void AttendBlocks(const HeadShape& shape, const float* q, const HeadBlocks& blocks,
                         void* memory, const SoftmaxState& state) {
  const Scratch<Numbers> scratch = MakeScratch<Numbers>(shape, memory);
  if constexpr (kLatent) {
    Numbers::ArrangeLatent(shape, q, scratch.q);
  } else {
    Numbers::ArrangeKeys(shape, q, scratch.q);
  }
  // Latent blocks are read twice: only what is a whole block ahead comes in at an even pace.
  const int64_t ahead = kLatent ? HeadBytes(shape) : kPrefetchAhead;
  const int64_t key_bytes = kLatent ? 0 : int64_t{shape.block} * shape.key_dim * Numbers::kItem;
  for (int i = 0; i < blocks.num_blocks; ++i) {
    const uint32_t* const selected =
        blocks.selected ? blocks.selected + int64_t{i} * (shape.block / 32) : nullptr;
    if (!AnySelected(shape, selected)) continue;
    const uint8_t* const head = blocks.blocks[i] + blocks.head_offset;
    Cursor cursor = MakeCursor(shape, blocks, i, ahead);
    BlockScores<Numbers, kLatent>(shape, head, scratch.q, selected, scratch.scores, cursor);
    Numbers::Weigh(shape, selected, scratch.scores, scratch.weights, state, cursor);
    BlockValues<Numbers, kLatent>(shape, head + key_bytes, selected, scratch.weights, state.o,
                                  cursor);
  }
}

template <typename Numbers>
inline void AttendWith(const HeadShape& shape, const float* q, const HeadBlocks& blocks,
                       void* scratch, const SoftmaxState& state) {
  if (shape.value_in_key) {
    AttendBlocks<Numbers, true>(shape, q, blocks, scratch, state);
  } else {
    AttendBlocks<Numbers, false>(shape, q, blocks, scratch, state);
  }
}
