// Latent blocks in tiles. Included inside the anonymous namespace of attention_amx.cc.
// A tile of a block holds 16 dims of 16 pairs of entries, and serves twice. Scores: A = the tile as
// it lies, B = queries [16 dims][16 heads][q, 0] for the even entries and [0, q] for the odd ones:
// half of a product is zeros, which costs less than to split the tile. Values: A = weights [16
// heads][32 entries], B = the tile, C = o. Heads in runs of 16, the last filled up with zero
// queries.
#pragma once

// Blocks are read twice, so half of one lies ahead: more than the first-level cache holds.
using LatentCursor = PrefetchCursor<2>;

constexpr int kNearTiles = 2;  // So far ahead of the scores a tile is brought to the first level.

struct LatentScratch {
  uint8_t* q;         // [runs], of each a line of zeros and [K / 16][16 dims][16 heads][q, 0]
  float* o;           // [runs][V / 16][16 heads][16 dims]: a tile's rows lie together
  float* scores;      // [D / 32][even, odd][16 entry pairs][16 heads]
  uint16_t* weights;  // [D / 32][16 heads][32 entries]
};

inline int64_t NumRuns(const HeadShape& shape) { return (shape.group + kRows - 1) / kRows; }

// Of the queries of a run.
inline int64_t RunBytes(const HeadShape& shape) {
  return 64 + int64_t{shape.key_dim} / kLanes * kTile;
}

inline int64_t LatentBytes(const HeadShape& shape) {
  return NumRuns(shape) * (RunBytes(shape) + shape.value_dim / kLanes * kTile) +
         shape.block * int64_t{kRows} * 6;
}

inline LatentScratch MakeLatent(const HeadShape& shape, void* memory) {
  auto* const q = static_cast<uint8_t*>(memory);
  uint8_t* const o = q + NumRuns(shape) * RunBytes(shape);
  uint8_t* const scores = o + NumRuns(shape) * (shape.value_dim / kLanes) * kTile;
  uint8_t* const weights = scores + shape.block * int64_t{kRows} * 4;
  return {q, reinterpret_cast<float*>(o), reinterpret_cast<float*>(scores),
          reinterpret_cast<uint16_t*>(weights)};
}

inline void ArrangeLatentTiles(const HeadShape& shape, const float* q, uint8_t* out) {
  for (int first = 0; first < shape.group; first += kRows) {
    _mm512_storeu_si512(out, _mm512_setzero_si512());
    out += 64;
    for (int d = 0; d < shape.key_dim; d += kLanes) {
      const float* const from = q + int64_t{first} * shape.key_dim + d;
      __m512i rows[16];
      for (int h = 0; h < kRows; ++h) {
        rows[h] = first + h < shape.group ? _mm512_loadu_si512(from + int64_t{h} * shape.key_dim)
                                          : _mm512_setzero_si512();
      }
      Transpose(rows);
      for (int i = 0; i < 16; ++i, out += 64) {
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_castsi512_ps(rows[i]));
        _mm512_storeu_si512(out, _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(rounded)));
      }
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

// A tile of a chunk times the queries for the even entries (in tile 4) and the odd ones (5);
// `near`: half a tile to be brought to the first level with each product.
template <int kEven, int kOdd, int kKeys, bool kNear>
inline void ScoreTile(const uint8_t* keys, int lines, LatentCursor& cursor) {
  const uint8_t* const near = keys + kNearTiles * kTile;
  LoadTileOnce<kKeys>(keys, 64);
  Product<kEven, kKeys, 4>();
  cursor.Lines(lines);
  if constexpr (kNear) PrefetchNear(near);
  Product<kOdd, kKeys, 5>();
  cursor.Lines(lines);
  if constexpr (kNear) PrefetchNear(near + kTile / 2);
}

// The scores of one or two chunks of 32 entries; two share the loads of the queries. Read two bytes
// early, [q, 0] is [0, q]: the zero comes from the number before.
template <int kChunks, bool kNear>
inline void LatentChunkScores(const uint8_t* chunk, int64_t chunk_bytes, const uint8_t* q,
                              int lines, float* scores, LatentCursor& cursor) {
  ClearTile<0>();
  ClearTile<1>();
  if constexpr (kChunks > 1) ClearTile<2>();
  if constexpr (kChunks > 1) ClearTile<3>();
  for (const uint8_t* const end = chunk + chunk_bytes; chunk < end; chunk += kTile, q += kTile) {
    LoadTile<4>(q, 64);
    LoadTile<5>(q - 2, 64);
    ScoreTile<0, 1, 6, kNear>(chunk, lines, cursor);
    if constexpr (kChunks > 1) ScoreTile<2, 3, 7, kNear>(chunk + chunk_bytes, lines, cursor);
  }
  StoreTile<0>(scores, 64);
  StoreTile<1>(scores + 256, 64);
  if constexpr (kChunks > 1) StoreTile<2>(scores + 512, 64);
  if constexpr (kChunks > 1) StoreTile<3>(scores + 768, 64);
}

template <bool kNear>
inline void LatentScores(const HeadShape& shape, const uint8_t* block, const uint8_t* q, int lines,
                         float* scores, LatentCursor& cursor) {
  const int64_t chunk_bytes = int64_t{shape.key_dim} * kEntryTile * 2;
  int left = shape.block / kEntryTile;
  for (; left > 1; left -= 2, block += 2 * chunk_bytes, scores += 1024) {
    LatentChunkScores<2, kNear>(block, chunk_bytes, q, lines, scores, cursor);
  }
  if (left > 0) LatentChunkScores<1, kNear>(block, chunk_bytes, q, lines, scores, cursor);
}

// Entries that do not count have no score.
inline void DropUnselected(const HeadShape& shape, const uint32_t* selected, float* scores) {
  for (int chunk = 0; chunk < shape.block / kEntryTile; ++chunk, scores += 512) {
    for (int entry = 0; entry < kEntryTile; ++entry) {
      if ((selected[chunk] >> entry & 1) != 0) continue;
      Store(scores + (entry % 2 * 16 + entry / 2) * kLanes, Set1(kNoScore));
    }
  }
}

// Turns the scores of a run of 16 heads, one in each lane, into weights; brings o to the new max.
template <typename Fetch>
inline void LatentSoftmax(const HeadShape& shape, const float* scores, uint16_t* weights, float* o,
                          Vec* state_max, Vec* state_sum, Fetch fetch) {
  const Vec scale = Set1(shape.scale * kLog2E);
  const int chunks = shape.block / kEntryTile;
  Vec tops[4] = {*state_max, *state_max, *state_max, *state_max};
  for (int i = 0; i < shape.block; i += 4) {
    for (int k = 0; k < 4; ++k) {
      tops[k] = Max(tops[k], Mul(Load(scores + (i + k) * kLanes), scale));
    }
  }
  const Vec max = Max(Max(tops[0], tops[1]), Max(tops[2], tops[3]));
  const Vec minus_max = _mm512_sub_ps(Zero(), max);
  const __m512i interleave =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  Vec sum = Zero(), sum_2 = Zero();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const float* const even = scores + chunk * 512;
    __m512i rows[16];
    for (int pair = 0; pair < 16; ++pair) {
      const Vec w = RoughExp2(Fma(Load(even + pair * kLanes), scale, minus_max));
      const Vec w_2 = RoughExp2(Fma(Load(even + 256 + pair * kLanes), scale, minus_max));
      sum = Add(sum, w);
      sum_2 = Add(sum_2, w_2);
      rows[pair] = _mm512_permutexvar_epi16(interleave, RoundTwo(w, w_2));
      fetch();
    }
    Transpose(rows);
    for (int h = 0; h < 16; ++h) _mm512_storeu_si512(weights + chunk * 512 + h * 32, rows[h]);
  }
  const __mmask16 rises = _mm512_cmp_ps_mask(*state_max, max, _CMP_NEQ_UQ);
  // 0 from the empty state on; 1 to the last bit where o stays as it is.
  const Vec shrink = Select(rises, Exp2(_mm512_sub_ps(*state_max, max)), Set1(1.0f));
  *state_sum = Fma(*state_sum, shrink, Add(sum, sum_2));
  if (rises != 0) {
    float factors[16];
    Store(factors, shrink);
    for (int64_t i = 0; i < shape.value_dim; ++i) {
      float* const row = o + i * kLanes;
      Store(row, Mul(Load(row), Set1(factors[i % kRows])));
    }
  }
  *state_max = max;
}

// Lines that the phases of a block prefetch, so that they come in at an even pace. One run of heads
// fetches a block while it reads it twice; more are bound by arithmetic, and their values bring in
// the next block.
struct LatentPace {
  int64_t ahead;  // Bytes.
  int scores;     // With each product.
  int softmax;    // With each pair of entries.
  int values;     // With each tile.

  // Tiles of the scores also come to the first level, a moment before they are loaded.
  bool near() const { return ahead > 0; }
};

inline LatentPace PaceOf(const HeadShape& shape, const HeadBlocks& blocks) {
  if (blocks.prefetch_bytes == 0) return {0, 0, 0, 0};
  const int64_t runs = NumRuns(shape);
  if (runs > 1) {
    const int64_t visits = runs * shape.value_dim;
    return {HeadBytes(shape), 0, 2, static_cast<int>((16 * shape.key_dim + visits - 1) / visits)};
  }
  // Of each tile's 16 lines 10 with the scores, one with each pair, the values the others.
  const int left = (6 * shape.key_dim - 256 + shape.value_dim - 1) / shape.value_dim;
  return {HeadBytes(shape) / 2, 5, 1, left > 0 ? left : 1};
}

// One run of heads over one block.
inline void LatentBlock(const HeadShape& shape, const uint8_t* block, const uint32_t* selected,
                        const LatentScratch& scratch, int run, const LatentPace& pace, Vec* max,
                        Vec* sum, LatentCursor& cursor) {
  const int64_t chunk_bytes = int64_t{shape.key_dim} * kEntryTile * 2;
  const uint8_t* const q = scratch.q + run * RunBytes(shape) + 64;
  float* const o = scratch.o + int64_t{run} * shape.value_dim * kRows;
  if (pace.near()) {
    LatentScores<true>(shape, block, q, pace.scores, scratch.scores, cursor);
  } else {
    LatentScores<false>(shape, block, q, pace.scores, scratch.scores, cursor);
  }
  if (selected) DropUnselected(shape, selected, scratch.scores);
  LatentSoftmax(shape, scratch.scores, scratch.weights, o, max, sum,
                [&] { cursor.Lines(pace.softmax); });
  for (int tile = 0; tile < shape.value_dim / kLanes; tile += 2) {
    const ValueTiles values{
        block + tile * kTile, chunk_bytes, scratch.weights, 512, 64, o + tile * 256, 256, 64};
    AddTileValues(shape.value_dim / kLanes - tile, shape.block / kEntryTile, selected, values,
                  [&] { cursor.Lines(pace.values); });
  }
}

inline void LatentAttend(const HeadShape& shape, const float* q, const HeadBlocks& blocks,
                         void* memory, const SoftmaxState& state) {
  const LatentScratch scratch = MakeLatent(shape, memory);
  const int runs = static_cast<int>(NumRuns(shape));
  const LatentPace pace = PaceOf(shape, blocks);
  ArrangeLatentTiles(shape, q, scratch.q);
  __builtin_memset(scratch.o, 0, runs * shape.value_dim * int64_t{kRows} * 4);
  MoveOutput<true>(shape, scratch.o, state.o);
  Configure(kRows);
  for (int i = 0; i < blocks.num_blocks; ++i) {
    const uint32_t* const selected =
        blocks.selected ? blocks.selected + int64_t{i} * (shape.block / 32) : nullptr;
    if (!AnySelected(shape, selected)) continue;
    const uint8_t* const block = blocks.blocks[i] + blocks.head_offset;
    LatentCursor cursor = MakeCursor<2>(shape, blocks, i, pace.ahead);
    for (int run = 0; run < runs; ++run) {
      const int first = run * kRows;
      const int heads = shape.group - first < kRows ? shape.group - first : kRows;
      Vec max = LoadPart(state.max + first, heads);
      Vec sum = LoadPart(state.sum + first, heads);
      LatentBlock(shape, block, selected, scratch, run, pace, &max, &sum, cursor);
      StorePart(state.max + first, max, heads);
      StorePart(state.sum + first, sum, heads);
    }
  }
  Release();
  MoveOutput<false>(shape, scratch.o, state.o);
}
