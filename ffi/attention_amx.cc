// AMX: tiles of 16 rows of 64 bytes, products of bfloat16 pairs, sums in float32. A kilobyte of a
// block is a tile as it lies. There is no store forwarding between tiles and vectors: what one
// phase writes the next one reads much later.
#include <immintrin.h>

#include "kernel.h"

namespace wscope {
namespace {

// Into the second-level cache: the tile loads take 16 lines at once from there, and prefetches into
// the first level would take the fill buffers that these need.
constexpr auto kPrefetchHint = _MM_HINT_T1;

#include "vec_avx512.h"

constexpr int64_t kPrefetchAhead = 8192;  // Bytes.

#include "attention_simd.h"

constexpr int kRows = 16;        // Of a tile.
constexpr int64_t kTile = 1024;  // Bytes.
constexpr int kTileDims = 32;    // Dims of a tile of queries or keys.
constexpr int kTileLines = 16;   // Prefetched with each tile of grouped heads.
// The tests run this file on processors without AMX.
#ifdef WSCOPE_EMULATE_TILES
#include "tests/emulated_tiles.h"
#else
#include "amx_tiles.h"
#endif

inline uint16_t Round(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline __m512i RoundTwo(Vec low, Vec high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// ---------------------------------------------------------------- grouped heads
// Scores: A = queries [R, 32 dims], B = keys [16 dim pairs][16 entries]. Values: A = weights
// [R, 32 entries], B = values [16 entry pairs][16 dims], C = o where it lies.

struct GroupedScratch {
  uint16_t* q;        // [R, K]
  float* scores;      // [R, D]
  uint16_t* weights;  // [R, D]
};

inline int64_t GroupedBytes(const HeadShape& shape) {
  return RoundUp(int64_t{shape.group} * shape.key_dim * 2, 64) +
         int64_t{shape.group} * shape.block * 6;
}

inline GroupedScratch MakeGrouped(const HeadShape& shape, void* scratch) {
  auto* const q = static_cast<uint16_t*>(scratch);
  auto* const scores = reinterpret_cast<float*>(
      static_cast<uint8_t*>(scratch) + RoundUp(int64_t{shape.group} * shape.key_dim * 2, 64));
  return {q, scores, reinterpret_cast<uint16_t*>(scores + int64_t{shape.group} * shape.block)};
}

// Step i of the scores of two groups of 16 entries, with the queries in tile kQuery.
template <int kQuery>
inline void ScoreStep(const uint8_t* a, const uint8_t* b, int i, bool fetch, Cursor& cursor) {
  LoadTile<6>(a + i * kTile, 64);
  Product<4, kQuery, 6>();
  if (fetch) cursor.Lines(kTileLines);
  LoadTile<7>(b + i * kTile, 64);
  Product<5, kQuery, 7>();
  if (fetch) cursor.Lines(kTileLines);
}

template <int kSteps>
inline void LoadQueries(const uint16_t* q) {
  LoadTile<0>(q, kSteps * 64);
  if constexpr (kSteps > 1) LoadTile<1>(q + kTileDims, kSteps * 64);
  if constexpr (kSteps > 2) LoadTile<2>(q + 2 * kTileDims, kSteps * 64);
  if constexpr (kSteps > 3) LoadTile<3>(q + 3 * kTileDims, kSteps * 64);
}

// The scores, not scaled, of one run of heads. kSteps: K / 32 up to 4, else 0: then the queries do
// not stay in tiles.
template <int kSteps>
inline void GroupedScores(const HeadShape& shape, const uint8_t* keys, const uint16_t* q,
                          const uint32_t* selected, bool fetch, float* scores, Cursor& cursor) {
  const int steps = shape.key_dim / kTileDims;
  const int64_t group_bytes = steps * kTile;
  if constexpr (kSteps > 0) LoadQueries<kSteps>(q);
  for (int entry = 0; entry < shape.block; entry += kEntryTile) {
    if (selected && selected[entry / kEntryTile] == 0) continue;
    const uint8_t* const a = keys + entry / kLanes * group_bytes;
    const uint8_t* const b = a + group_bytes;
    ClearTile<4>();
    ClearTile<5>();
    if constexpr (kSteps > 0) {
      ScoreStep<0>(a, b, 0, fetch, cursor);
      if constexpr (kSteps > 1) ScoreStep<1>(a, b, 1, fetch, cursor);
      if constexpr (kSteps > 2) ScoreStep<2>(a, b, 2, fetch, cursor);
      if constexpr (kSteps > 3) ScoreStep<3>(a, b, 3, fetch, cursor);
    } else {
      for (int i = 0; i < steps; ++i) {
        LoadTile<0>(q + i * kTileDims, steps * 64);
        ScoreStep<0>(a, b, i, fetch, cursor);
      }
    }
    StoreTile<4>(scores + entry, int64_t{shape.block} * 4);
    StoreTile<5>(scores + entry + kLanes, int64_t{shape.block} * 4);
    cursor.Wrap();
  }
}

inline void ScoresOfRun(const HeadShape& shape, const uint8_t* keys, const uint16_t* q,
                        const uint32_t* selected, bool fetch, float* scores, Cursor& cursor) {
  switch (shape.key_dim / kTileDims) {
    case 1:
      return GroupedScores<1>(shape, keys, q, selected, fetch, scores, cursor);
    case 2:
      return GroupedScores<2>(shape, keys, q, selected, fetch, scores, cursor);
    case 3:
      return GroupedScores<3>(shape, keys, q, selected, fetch, scores, cursor);
    case 4:
      return GroupedScores<4>(shape, keys, q, selected, fetch, scores, cursor);
    default:
      return GroupedScores<0>(shape, keys, q, selected, fetch, scores, cursor);
  }
}

// o += weights * values for kTiles tiles of dims from `tiles` on in every chunk.
template <int kTiles>
inline void TileValues(const HeadShape& shape, const uint8_t* tiles, int64_t chunk_bytes,
                       const uint32_t* selected, const uint16_t* weights, int64_t weight_step,
                       int64_t weight_stride, float* o, int64_t o_step, int64_t o_stride, int lines,
                       Cursor& cursor) {
  LoadTile<0>(o, o_stride);
  if constexpr (kTiles > 1) LoadTile<1>(o + o_step, o_stride);
  if constexpr (kTiles > 2) LoadTile<2>(o + 2 * o_step, o_stride);
  if constexpr (kTiles > 3) LoadTile<3>(o + 3 * o_step, o_stride);
  for (int chunk = 0; chunk < shape.block / kEntryTile; ++chunk) {
    const uint8_t* const at = tiles + chunk * chunk_bytes;
    if (selected && selected[chunk] == 0) continue;
    LoadTile<4>(weights + chunk * weight_step, weight_stride);
    LoadTile<6>(at, 64);
    Product<0, 4, 6>();
    cursor.Lines(lines);
    if constexpr (kTiles > 1) {
      LoadTile<7>(at + kTile, 64);
      Product<1, 4, 7>();
      cursor.Lines(lines);
    }
    if constexpr (kTiles > 2) {
      LoadTile<6>(at + 2 * kTile, 64);
      Product<2, 4, 6>();
      cursor.Lines(lines);
    }
    if constexpr (kTiles > 3) {
      LoadTile<7>(at + 3 * kTile, 64);
      Product<3, 4, 7>();
      cursor.Lines(lines);
    }
    cursor.Wrap();
  }
  StoreTile<0>(o, o_stride);
  if constexpr (kTiles > 1) StoreTile<1>(o + o_step, o_stride);
  if constexpr (kTiles > 2) StoreTile<2>(o + 2 * o_step, o_stride);
  if constexpr (kTiles > 3) StoreTile<3>(o + 3 * o_step, o_stride);
}

// The same for up to four tiles.
inline void SomeTileValues(int tiles_left, const HeadShape& shape, const uint8_t* tiles,
                           int64_t chunk_bytes, const uint32_t* selected, const uint16_t* weights,
                           int64_t weight_step, int64_t weight_stride, float* o, int64_t o_step,
                           int64_t o_stride, int lines, Cursor& cursor) {
  const auto run = [&](auto count) {
    TileValues<decltype(count)::kValue>(shape, tiles, chunk_bytes, selected, weights, weight_step,
                                        weight_stride, o, o_step, o_stride, lines, cursor);
  };
  switch (tiles_left) {
    case 1:
      return run(Heads<1>{});
    case 2:
      return run(Heads<2>{});
    case 3:
      return run(Heads<3>{});
    default:
      return run(Heads<4>{});
  }
}

inline void GroupedValues(const HeadShape& shape, const uint8_t* values, const uint32_t* selected,
                          const uint16_t* weights, bool fetch, float* o, Cursor& cursor) {
  for (int first = 0; first < shape.value_dim; first += kPanelDims) {
    const int dims = shape.value_dim - first < kPanelDims ? shape.value_dim - first : kPanelDims;
    SomeTileValues(dims / kLanes, shape, values + int64_t{first} * shape.block * 2,
                   int64_t{kEntryTile} * dims * 2, selected, weights, kEntryTile,
                   int64_t{shape.block} * 2, o + first, kLanes, int64_t{shape.value_dim} * 4,
                   fetch ? kTileLines : 0, cursor);
  }
}

inline void GroupedSoftmax(const HeadShape& shape, const uint32_t* selected, float* scores,
                           uint16_t* weights, const SoftmaxState& state) {
  for (int h = 0; h < shape.group; ++h) {
    uint16_t* const row = weights + int64_t{h} * shape.block;
    SoftmaxHead(
        shape, selected, shape.scale * kLog2E, scores + int64_t{h} * shape.block,
        state.o + int64_t{h} * shape.value_dim, state.max + h, state.sum + h,
        [](Vec x) { return RoughExp2(x); },
        [row](int i, Vec w, Vec w_2) { _mm512_storeu_si512(row + i, RoundTwo(w, w_2)); });
  }
}

inline void GroupedAttend(const HeadShape& shape, const float* q, const HeadBlocks& blocks,
                          void* memory, const SoftmaxState& state) {
  const GroupedScratch scratch = MakeGrouped(shape, memory);
  for (int64_t i = 0; i < int64_t{shape.group} * shape.key_dim; ++i) scratch.q[i] = Round(q[i]);
  const int run = shape.group < kRows ? shape.group : kRows;
  Configure(run);
  for (int i = 0; i < blocks.num_blocks; ++i) {
    const uint32_t* const selected =
        blocks.selected ? blocks.selected + int64_t{i} * (shape.block / 32) : nullptr;
    if (!AnySelected(shape, selected)) continue;
    const uint8_t* const keys = blocks.blocks[i] + blocks.head_offset;
    const uint8_t* const values = keys + int64_t{shape.block} * shape.key_dim * 2;
    Cursor cursor = MakeCursor(shape, blocks, i);
    // The last run of more than 16 heads may repeat some of the run before.
    for (int first = 0; first < shape.group; first += run) {
      const int64_t h = first + run <= shape.group ? first : shape.group - run;
      ScoresOfRun(shape, keys, scratch.q + h * shape.key_dim, selected, first == 0,
                  scratch.scores + h * shape.block, cursor);
    }
    GroupedSoftmax(shape, selected, scratch.scores, scratch.weights, state);
    for (int first = 0; first < shape.group; first += run) {
      if (first > 0 && first + run > shape.group) Configure(shape.group - first);
      GroupedValues(shape, values, selected, scratch.weights + int64_t{first} * shape.block,
                    first == 0, state.o + int64_t{first} * shape.value_dim, cursor);
    }
    if (shape.group % run != 0) Configure(run);
  }
  Release();
}

// ---------------------------------------------------------------- latent
// A row of a block holds 16 dims of two entries, and serves twice. Scores: A = the row's tile
// [16 entry pairs][16 dims x 2], B = queries with zeros, (q, 0) for the even entries and (0, q) for
// the odd ones, so C = [16 entry pairs][16 heads]. Values: A = weights [16 heads][32 entries], B =
// the tile, C = o. Heads in runs of 16, the last filled up with zero queries.

struct LatentScratch {
  uint16_t* q;        // [runs][K / 16][even, odd][16 dims][16 heads][2]
  float* o;           // [runs][V / 16][16 heads][16 dims]: a tile's rows lie together
  float* scores;      // [D / 32][even, odd][16 entry pairs][16 heads]
  uint16_t* weights;  // [D / 32][16 heads][32 entries]
};

inline int64_t NumRuns(const HeadShape& shape) { return (shape.group + kRows - 1) / kRows; }

inline int64_t LatentBytes(const HeadShape& shape) {
  return NumRuns(shape) * (shape.key_dim / kLanes * 2 + shape.value_dim / kLanes) * kTile +
         shape.block * int64_t{kRows} * 6;
}

inline LatentScratch MakeLatent(const HeadShape& shape, void* memory) {
  auto* const bytes = static_cast<uint8_t*>(memory);
  uint8_t* const o = bytes + NumRuns(shape) * (shape.key_dim / kLanes * 2) * kTile;
  uint8_t* const scores = o + NumRuns(shape) * (shape.value_dim / kLanes) * kTile;
  uint8_t* const weights = scores + shape.block * int64_t{kRows} * 4;
  return {reinterpret_cast<uint16_t*>(bytes), reinterpret_cast<float*>(o),
          reinterpret_cast<float*>(scores), reinterpret_cast<uint16_t*>(weights)};
}

inline void ArrangeLatentTiles(const HeadShape& shape, const float* q, uint16_t* out) {
  const int tiles = shape.key_dim / kLanes;
  __builtin_memset(out, 0, NumRuns(shape) * tiles * 2 * kTile);
  for (int h = 0; h < shape.group; ++h) {
    uint16_t* const run = out + int64_t{h / kRows} * tiles * kTile;
    for (int d = 0; d < shape.key_dim; ++d) {
      uint16_t* const even = run + int64_t{d / kLanes} * kTile + d % kLanes * 32 + h % kRows * 2;
      even[0] = Round(q[int64_t{h} * shape.key_dim + d]);
      even[kTile / 2 + 1] = even[0];
    }
  }
}

// Moves o between the state's rows and tiles.
template <bool kToTiles>
inline void MoveOutput(const HeadShape& shape, float* tiles, float* rows) {
  for (int h = 0; h < shape.group; ++h) {
    float* tile = tiles + int64_t{h / kRows} * shape.value_dim * kRows + h % kRows * kLanes;
    float* row = rows + int64_t{h} * shape.value_dim;
    for (int d = 0; d < shape.value_dim; d += kLanes, tile += kRows * kLanes, row += kLanes) {
      if (kToTiles) {
        Store(tile, Load(row));
      } else {
        Store(row, Load(tile));
      }
    }
  }
}

// Scores of kChunks chunks of 32 entries.
template <int kChunks>
inline void LatentTileScores(const uint8_t* chunk, int64_t chunk_bytes, const uint16_t* q,
                             int tiles, int lines, float* scores, Cursor& cursor) {
  ClearTile<0>();
  ClearTile<1>();
  if constexpr (kChunks > 1) {
    ClearTile<2>();
    ClearTile<3>();
  }
  for (int tile = 0; tile < tiles; ++tile, chunk += kTile, q += kTile) {
    LoadTile<6>(chunk, 64);
    LoadTile<4>(q, 64);
    Product<0, 6, 4>();
    cursor.Lines(lines);
    LoadTile<5>(q + kTile / 2, 64);
    Product<1, 6, 5>();
    if constexpr (kChunks > 1) {
      LoadTile<7>(chunk + chunk_bytes, 64);
      Product<2, 7, 4>();
      cursor.Lines(lines);
      Product<3, 7, 5>();
    }
  }
  StoreTile<0>(scores, 64);
  StoreTile<1>(scores + 256, 64);
  if constexpr (kChunks > 1) {
    StoreTile<2>(scores + 512, 64);
    StoreTile<3>(scores + 768, 64);
  }
  cursor.Wrap();
}

// 16 rows of 16 32-bit numbers, to columns.
inline void Transpose(__m512i* rows) {
  __m512i a[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
    rows[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
  }
}

// Whether entry 2 pair + side of a chunk counts.
inline bool Counts(const uint32_t* selected, int chunk, int pair, int side) {
  return !selected || (selected[chunk] >> (2 * pair + side) & 1) != 0;
}

// Turns the scores of a run of 16 heads, one in each lane, into weights; brings o to the new max.
inline void LatentSoftmax(const HeadShape& shape, const uint32_t* selected, float* scores,
                          uint16_t* weights, float* o, Vec* state_max, Vec* state_sum) {
  const Vec scale = Set1(shape.scale * kLog2E);
  const int chunks = shape.block / kEntryTile;
  Vec max = *state_max;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    float* const at = scores + chunk * 512;
    for (int i = 0; i < 32; ++i) {
      if (!Counts(selected, chunk, i % 16, i / 16)) {
        Store(at + i * kLanes, Set1(kNoScore));
        continue;
      }
      const Vec x = Mul(Load(at + i * kLanes), scale);
      Store(at + i * kLanes, x);
      max = Max(max, x);
    }
  }
  const __m512i interleave =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  Vec sum = Zero();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const float* const even = scores + chunk * 512;
    __m512i rows[16];
    for (int pair = 0; pair < 16; ++pair) {
      const Vec w = RoughExp2(_mm512_sub_ps(Load(even + pair * kLanes), max));
      const Vec w_2 = RoughExp2(_mm512_sub_ps(Load(even + 256 + pair * kLanes), max));
      sum = Add(sum, Add(w, w_2));
      rows[pair] = _mm512_permutexvar_epi16(interleave, RoundTwo(w, w_2));
    }
    Transpose(rows);
    for (int h = 0; h < 16; ++h) _mm512_storeu_si512(weights + chunk * 512 + h * 32, rows[h]);
  }
  const Vec shrink = Exp2(_mm512_sub_ps(*state_max, max));  // 0 from the empty state on.
  *state_sum = Fma(*state_sum, shrink, sum);
  if (_mm512_cmp_ps_mask(*state_max, max, _CMP_NEQ_UQ) != 0) {
    float factors[16];
    Store(factors, shrink);
    for (int64_t i = 0; i < shape.value_dim; ++i) {
      float* const row = o + i * kLanes;
      Store(row, Mul(Load(row), Set1(factors[i % kRows])));
    }
  }
  *state_max = max;
}

// One run of heads over one block.
inline void LatentBlock(const HeadShape& shape, const uint8_t* block, const uint32_t* selected,
                        const LatentScratch& scratch, int run, int lines, Vec* max, Vec* sum,
                        Cursor& cursor) {
  const int tiles = shape.key_dim / kLanes;
  const int64_t chunk_bytes = tiles * kTile;
  const uint16_t* const q = scratch.q + int64_t{run} * tiles * kTile;
  float* const o = scratch.o + int64_t{run} * shape.value_dim * kRows;
  const int chunks = shape.block / kEntryTile;
  for (int chunk = 0; chunk < chunks; chunk += 2) {
    const uint8_t* const at = block + chunk * chunk_bytes;
    float* const scores = scratch.scores + chunk * 512;
    if (chunk + 1 < chunks) {
      LatentTileScores<2>(at, chunk_bytes, q, tiles, lines, scores, cursor);
    } else {
      LatentTileScores<1>(at, chunk_bytes, q, tiles, lines, scores, cursor);
    }
  }
  LatentSoftmax(shape, selected, scratch.scores, scratch.weights, o, max, sum);
  for (int tile = 0; tile < shape.value_dim / kLanes; tile += 4) {
    SomeTileValues(shape.value_dim / kLanes - tile, shape, block + tile * kTile, chunk_bytes,
                   selected, scratch.weights, 512, 64, o + tile * 256, 256, 64, lines, cursor);
  }
}

inline void LatentAttend(const HeadShape& shape, const float* q, const HeadBlocks& blocks,
                         void* memory, const SoftmaxState& state) {
  const LatentScratch scratch = MakeLatent(shape, memory);
  const int runs = static_cast<int>(NumRuns(shape));
  ArrangeLatentTiles(shape, q, scratch.q);
  __builtin_memset(scratch.o, 0, runs * shape.value_dim * int64_t{kRows} * 4);
  MoveOutput<true>(shape, scratch.o, state.o);
  // Each byte is read twice for each run: so many lines to prefetch with each tile.
  const int visits = (shape.key_dim + shape.value_dim) * runs;
  const int lines = (16 * shape.key_dim + visits - 1) / visits;
  Configure(kRows);
  for (int i = 0; i < blocks.num_blocks; ++i) {
    const uint32_t* const selected =
        blocks.selected ? blocks.selected + int64_t{i} * (shape.block / 32) : nullptr;
    if (!AnySelected(shape, selected)) continue;
    const uint8_t* const block = blocks.blocks[i] + blocks.head_offset;
    Cursor cursor = MakeCursor(shape, blocks, i);
    for (int run = 0; run < runs; ++run) {
      const int first = run * kRows;
      const int heads = shape.group - first < kRows ? shape.group - first : kRows;
      Vec max = LoadPart(state.max + first, heads);
      Vec sum = LoadPart(state.sum + first, heads);
      LatentBlock(shape, block, selected, scratch, run, lines, &max, &sum, cursor);
      StorePart(state.max + first, max, heads);
      StorePart(state.sum + first, sum, heads);
    }
  }
  Release();
  MoveOutput<false>(shape, scratch.o, state.o);
}

// ---------------------------------------------------------------- the kernel

inline bool Supports(const HeadShape& shape) {
  if (!shape.bfloat16 || shape.value_dim % kLanes != 0) return false;
  return shape.key_dim % (shape.value_in_key ? kLanes : kTileDims) == 0;
}

inline int64_t ScratchBytes(const HeadShape& shape) {
  return shape.value_in_key ? LatentBytes(shape) : GroupedBytes(shape);
}

inline void TileAttend(const HeadShape& shape, const float* q, const HeadBlocks& blocks,
                       void* scratch, const SoftmaxState& state) {
  if (blocks.num_blocks == 0) return;
  if (shape.value_in_key) {
    LatentAttend(shape, q, blocks, scratch, state);
  } else {
    GroupedAttend(shape, q, blocks, scratch, state);
  }
}

}  // namespace

#ifdef WSCOPE_EMULATE_TILES
extern const Kernel kEmulatedAmxKernel;
const Kernel kEmulatedAmxKernel = {
#else
const Kernel kAmxKernel = {
#endif
    "amx", false, 1.1, 1, &kAvx512Kernel, &Supports, &ScratchBytes, &TileAttend, &Read};

}  // namespace wscope
