// Latent blocks in tiles. Included inside the anonymous namespace of attention_amx.cc.
// A row of a block holds 16 dims of two entries, and serves twice. Scores: two tiles of dims are
// split into A = the even entries [16 entries][16 dims x 2] and A = the odd ones, a shift and a
// blend a row; B = queries, C = [16 entries][16 heads]. Values: A = weights [16 heads][32 entries],
// B = the tile as it lies, C = o. Heads in runs of 16, the last filled up with zero queries.

constexpr int kUnitDims = 32;              // Split at once.
constexpr int64_t kUnitBytes = 2 * kTile;  // Of a chunk of 32 entries.
constexpr int kUnitSlots = 2;

struct LatentScratch {
  uint16_t* q;        // [runs][K / 32][16 dims][16 heads][2]: dims d and d + 16
  uint8_t* units;     // [slots][even, odd][16 entries][16 dims][2]
  float* o;           // [runs][V / 16][16 heads][16 dims]: a tile's rows lie together
  float* scores;      // [D / 32][even, odd][16 entry pairs][16 heads]
  uint16_t* weights;  // [D / 32][16 heads][32 entries]
};

inline int64_t NumRuns(const HeadShape& shape) { return (shape.group + kRows - 1) / kRows; }

inline int64_t LatentBytes(const HeadShape& shape) {
  return NumRuns(shape) * (shape.key_dim / kUnitDims + shape.value_dim / kLanes) * kTile +
         kUnitSlots * kUnitBytes + shape.block * int64_t{kRows} * 6;
}

inline LatentScratch MakeLatent(const HeadShape& shape, void* memory) {
  auto* const q = static_cast<uint8_t*>(memory);
  uint8_t* const units = q + NumRuns(shape) * (shape.key_dim / kUnitDims) * kTile;
  uint8_t* const o = units + kUnitSlots * kUnitBytes;
  uint8_t* const scores = o + NumRuns(shape) * (shape.value_dim / kLanes) * kTile;
  uint8_t* const weights = scores + shape.block * int64_t{kRows} * 4;
  return {reinterpret_cast<uint16_t*>(q), units, reinterpret_cast<float*>(o),
          reinterpret_cast<float*>(scores), reinterpret_cast<uint16_t*>(weights)};
}

// 16 dims of the queries of 16 heads, turned: in the low half of row d dim d of every head.
inline void TurnQueries(const HeadShape& shape, const float* q, int first, __m512i* rows) {
  for (int h = 0; h < kRows; ++h) {
    rows[h] = first + h < shape.group ? _mm512_loadu_si512(q + int64_t{h} * shape.key_dim)
                                      : _mm512_setzero_si512();
  }
  Transpose(rows);
  for (int i = 0; i < 16; ++i) {
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_castsi512_ps(rows[i]));
    rows[i] = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(rounded));
  }
}

inline void ArrangeLatentTiles(const HeadShape& shape, const float* q, uint16_t* out) {
  for (int first = 0; first < shape.group; first += kRows) {
    for (int d = 0; d < shape.key_dim; d += kUnitDims, out += kTile / 2) {
      const float* const from = q + int64_t{first} * shape.key_dim + d;
      __m512i low[16], high[16];
      TurnQueries(shape, from, first, low);
      TurnQueries(shape, from + kLanes, first, high);
      for (int i = 0; i < 16; ++i) {
        _mm512_storeu_si512(out + 32 * i, _mm512_or_si512(low[i], _mm512_slli_epi32(high[i], 16)));
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

// Splits two tiles of 16 dims into the even entries and the odd ones.
inline void SplitUnit(const uint8_t* from, uint8_t* to, int lines, Cursor& cursor) {
  for (int row = 0; row < kRows; ++row, from += 64, to += 64) {
    cursor.Lines(lines);
    const __m512i a = _mm512_loadu_si512(from);
    const __m512i b = _mm512_loadu_si512(from + kTile);
    _mm512_store_si512(to, _mm512_mask_mov_epi16(a, 0xaaaaaaaau, _mm512_slli_epi32(b, 16)));
    _mm512_store_si512(to + kTile, _mm512_mask_mov_epi16(b, 0x55555555u, _mm512_srli_epi32(a, 16)));
  }
}

template <int kQuery, int kEven, int kOdd>
inline void MultiplyUnit(const uint16_t* q, const uint8_t* unit) {
  LoadTile<kQuery>(q, 64);
  LoadTile<kEven>(unit, 64);
  Product<0, kEven, kQuery>();
  LoadTile<kOdd>(unit + kTile, 64);
  Product<1, kOdd, kQuery>();
}

// The scores of a chunk of 32 entries. A unit is multiplied after the next one was split: by then
// its stores have left the store buffer, from which no tile is loaded.
inline void LatentChunkScores(const uint8_t* chunk, int units, const uint16_t* q, uint8_t* slots,
                              int lines, float* scores, Cursor& cursor) {
  const auto slot = [&](int unit) { return slots + unit % kUnitSlots * kUnitBytes; };
  ClearTile<0>();
  ClearTile<1>();
  SplitUnit(chunk, slot(0), lines, cursor);
  for (int unit = 0; unit < units; ++unit, q += kTile / 2) {
    if (unit + 1 < units) SplitUnit(chunk + (unit + 1) * kUnitBytes, slot(unit + 1), lines, cursor);
    if (unit % 3 == 0) {
      MultiplyUnit<2, 5, 6>(q, slot(unit));
    } else if (unit % 3 == 1) {
      MultiplyUnit<3, 7, 5>(q, slot(unit));
    } else {
      MultiplyUnit<4, 6, 7>(q, slot(unit));
    }
  }
  StoreTile<0>(scores, 64);
  StoreTile<1>(scores + 256, 64);
  cursor.Wrap();
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
  const Vec shrink = Exp2(_mm512_sub_ps(*state_max, max));  // 0 from the empty state on.
  *state_sum = Fma(*state_sum, shrink, Add(sum, sum_2));
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

// Lines that the phases of a block prefetch, so that they come in at an even pace. One run of heads
// fetches a block while it reads it twice; more are bound by arithmetic, and their values bring in
// the next block.
struct LatentPace {
  int64_t ahead;  // Bytes.
  int scores;     // With each row of a unit.
  int softmax;    // With each pair of entries.
  int values;     // With each tile.
};

inline LatentPace PaceOf(const HeadShape& shape, const HeadBlocks& blocks) {
  if (blocks.prefetch_bytes == 0) return {0, 0, 0, 0};
  const int64_t runs = NumRuns(shape);
  if (runs > 1) {
    const int64_t visits = runs * shape.value_dim;
    return {HeadBytes(shape), 0, 2, static_cast<int>((16 * shape.key_dim + visits - 1) / visits)};
  }
  // Half of the lines with the scores, an entry's worth with each pair, the others are left.
  const int left = (shape.key_dim / 64 - 1) * 512 / shape.value_dim;
  return {HeadBytes(shape) / 2, 1, 2, left > 0 ? left : 1};
}

// One run of heads over one block.
inline void LatentBlock(const HeadShape& shape, const uint8_t* block, const uint32_t* selected,
                        const LatentScratch& scratch, int run, const LatentPace& pace, Vec* max,
                        Vec* sum, Cursor& cursor) {
  const int64_t chunk_bytes = int64_t{shape.key_dim} * kEntryTile * 2;
  const int units = shape.key_dim / kUnitDims;
  const uint16_t* const q = scratch.q + int64_t{run} * units * (kTile / 2);
  float* const o = scratch.o + int64_t{run} * shape.value_dim * kRows;
  for (int chunk = 0; chunk < shape.block / kEntryTile; ++chunk) {
    LatentChunkScores(block + chunk * chunk_bytes, units, q, scratch.units, pace.scores,
                      scratch.scores + chunk * 512, cursor);
  }
  if (selected) DropUnselected(shape, selected, scratch.scores);
  LatentSoftmax(shape, scratch.scores, scratch.weights, o, max, sum,
                [&] { cursor.Lines(pace.softmax); });
  for (int tile = 0; tile < shape.value_dim / kLanes; tile += 2) {
    cursor.Wrap();
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
    Cursor cursor = MakeCursor(shape, blocks, i, pace.ahead);
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
