// Decode attention in float32 arithmetic on vectors of 16 floats. Included inside the anonymous
// namespace of a file of one instruction set, which has defined
//   Vec, Zero, Set1, Load, Store, LoadPart, StorePart, Add, Mul, Fma, Max, ReduceAdd, ReduceMax,
//   Exp2, Even, Odd, EvenPart, OddPart, LoadHalves, Select, Prefetch,
//   kPrefetchAhead (bytes, of grouped heads; measured: docs/kernel.md),
//   kMaxHeads (at once), kLatentHeads, kValueTiles (at kMaxHeads; twice as many for fewer heads)

// Runs through the head's bytes in their order, ahead of the loads, and on into the next block.
struct Cursor {
  const uint8_t* at;
  const uint8_t* end;
  const uint8_t* next;  // Where the next block's head begins.

  inline void Lines(int count) {
    for (int i = 0; i < count; ++i) Prefetch(at + 64 * i);
    at += 64 * count;
  }
  // To be called now and then: follows into the next block.
  inline void Wrap() {
    if (at < end) return;
    at = next + (at - end);
    end = next + (int64_t{1} << 40);
  }
};

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kNoScore = -__builtin_inff();

inline int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline int64_t ItemBytes(const HeadShape& shape) { return shape.bfloat16 ? 2 : 4; }

inline int64_t HeadBytes(const HeadShape& shape) {
  const int64_t dims = shape.key_dim + (shape.value_in_key ? 0 : shape.value_dim);
  return shape.block * dims * ItemBytes(shape);
}

// Latent blocks are read twice: only what is a whole block ahead comes in at an even pace.
inline Cursor MakeCursor(const HeadShape& shape, const HeadBlocks& blocks, int i) {
  const int64_t head_bytes = HeadBytes(shape);
  int64_t ahead = blocks.prefetch_bytes;
  if (ahead == kOwnPrefetch) ahead = shape.value_in_key ? head_bytes : kPrefetchAhead;
  const uint8_t* const begin = blocks.blocks[i] + blocks.head_offset;
  const uint8_t* const next =
      i + 1 < blocks.num_blocks ? blocks.blocks[i + 1] + blocks.head_offset : begin;
  Cursor cursor{begin + ahead, begin + head_bytes, next};
  cursor.Wrap();
  return cursor;
}

// Scores, not scaled, of two groups of 16 entries for kHeads heads. q: [K][kHeads].
template <bool kBf16, int kHeads, bool kFetch>
inline void KeyScores(const uint8_t* keys, const float* q, int key_dim, float* scores,
                      int64_t stride, Cursor& cursor) {
  constexpr int kItem = kBf16 ? 2 : 4;
  const uint8_t* a = keys;
  const uint8_t* b = keys + int64_t{kLanes} * key_dim * kItem;
  Vec sum_a[kHeads], sum_b[kHeads];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) sum_a[h] = sum_b[h] = Zero();
  if constexpr (kBf16) {
    for (int d = 0; d + 2 <= key_dim; d += 2, a += 64, b += 64, q += 2 * kHeads) {
      if (kFetch) cursor.Lines(2);
      const Vec even_a = Even(a), even_b = Even(b), odd_a = Odd(a), odd_b = Odd(b);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const Vec even = Set1(q[h]);
        sum_a[h] = Fma(even, even_a, sum_a[h]);
        sum_b[h] = Fma(even, even_b, sum_b[h]);
      }
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const Vec odd = Set1(q[kHeads + h]);
        sum_a[h] = Fma(odd, odd_a, sum_a[h]);
        sum_b[h] = Fma(odd, odd_b, sum_b[h]);
      }
    }
    if (key_dim % 2 != 0) {
      const Vec last_a = LoadHalves(a), last_b = LoadHalves(b);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        sum_a[h] = Fma(Set1(q[h]), last_a, sum_a[h]);
        sum_b[h] = Fma(Set1(q[h]), last_b, sum_b[h]);
      }
    }
  } else {
    for (int d = 0; d < key_dim; ++d, a += 64, b += 64, q += kHeads) {
      if (kFetch) cursor.Lines(2);
      const Vec row_a = Load(reinterpret_cast<const float*>(a));
      const Vec row_b = Load(reinterpret_cast<const float*>(b));
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const Vec number = Set1(q[h]);
        sum_a[h] = Fma(number, row_a, sum_a[h]);
        sum_b[h] = Fma(number, row_b, sum_b[h]);
      }
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
    Store(scores + h * stride, sum_a[h]);
    Store(scores + h * stride + kLanes, sum_b[h]);
  }
}

// Scores of the 32 entries of a latent tile for kHeads heads. q: [tiles][kHeads][16], zeros behind
// K.
template <bool kBf16, int kHeads, bool kFetch>
inline void LatentScores(const uint8_t* chunk, const float* q, int key_dim, int value_dim,
                         float* scores, int64_t stride, Cursor& cursor) {
  constexpr int kItem = kBf16 ? 2 : 4;
  constexpr int kRows = 2;  // Entries at a time.
  const int full = key_dim / kLanes;
  const int rest = key_dim % kLanes;
  // The values pass prefetches one line for each two that it reads again; here come the others.
  const int lines = (full - value_dim / kLanes / 2) * kItem / 2;
  for (int entry = 0; entry < kEntryTile; entry += kRows) {
    Vec sums[kHeads][kRows];
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[h][r] = Zero();
    }
    const uint8_t* row = chunk + int64_t{entry} * kLanes * kItem;
    const float* q_tile = q;
    if (kFetch) cursor.Lines(lines);
    for (int tile = 0; tile < full; ++tile) {
      Vec x[kRows];
      if constexpr (kBf16) {
        x[0] = Even(row);
        x[1] = Odd(row);
      } else {
        x[0] = Load(reinterpret_cast<const float*>(row));
        x[1] = Load(reinterpret_cast<const float*>(row) + kLanes);
      }
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const Vec q_h = Load(q_tile + h * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sums[h][r] = Fma(q_h, x[r], sums[h][r]);
      }
      row += int64_t{kEntryTile} * kLanes * kItem;
      q_tile += kHeads * kLanes;
    }
    if (rest > 0) {
      row = chunk + int64_t{full} * kEntryTile * kLanes * kItem + int64_t{entry} * rest * kItem;
      Vec x[kRows];
      if constexpr (kBf16) {
        x[0] = EvenPart(row, rest);
        x[1] = OddPart(row, rest);
      } else {
        x[0] = LoadPart(reinterpret_cast<const float*>(row), rest);
        x[1] = LoadPart(reinterpret_cast<const float*>(row) + rest, rest);
      }
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const Vec q_h = Load(q_tile + h * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sums[h][r] = Fma(q_h, x[r], sums[h][r]);
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        scores[h * stride + entry + r] = ReduceAdd(sums[h][r]);
      }
    }
  }
}

// o[h][dims of kTiles tiles] += weights[h] * values, over the 32 entries of a chunk. Where kPart,
// it is one tile of `width` dims, of which the first `dims` are values.
template <bool kBf16, int kHeads, int kTiles, bool kPart, int kLines>
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
    if (kLines > 0) cursor.Lines(kLines);
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

// Turns one head's scores into weights 2^(scale * score - max) and brings its state to the new max.
// put(i, w, w_2) takes the weights of 32 entries from i on.
template <typename Exp, typename Put>
inline void SoftmaxHead(const HeadShape& shape, const uint32_t* selected, float scale,
                        float* scores, float* o, float* state_max, float* state_sum, Exp exp2,
                        Put put) {
  if (selected) {
    for (int i = 0; i < shape.block; i += kLanes) {
      const uint32_t bits = selected[i / 32] >> (i % 32);
      Store(scores + i, Select(bits & 0xffff, Load(scores + i), Set1(kNoScore)));
    }
  }
  Vec top = Load(scores);
  Vec top_2 = Load(scores + kLanes);
  for (int i = 2 * kLanes; i < shape.block; i += 2 * kLanes) {
    top = Max(top, Load(scores + i));
    top_2 = Max(top_2, Load(scores + i + kLanes));
  }
  const float block_max = scale * ReduceMax(Max(top, top_2));
  const float old_max = *state_max;
  const float max = block_max > old_max ? block_max : old_max;
  if (max == kNoScore) {  // Nothing selected so far: no weight may become NaN.
    for (int i = 0; i < shape.block; i += 2 * kLanes) put(i, Zero(), Zero());
    return;
  }
  const Vec factor = Set1(scale);
  const Vec minus_max = Set1(-max);
  Vec sum = Zero(), sum_2 = Zero();
  for (int i = 0; i < shape.block; i += 2 * kLanes) {
    const Vec w = exp2(Fma(Load(scores + i), factor, minus_max));
    const Vec w_2 = exp2(Fma(Load(scores + i + kLanes), factor, minus_max));
    put(i, w, w_2);
    sum = Add(sum, w);
    sum_2 = Add(sum_2, w_2);
  }
  float shrink = 1.0f;
  if (max > old_max) {
    shrink = old_max == kNoScore ? 0.0f : __builtin_exp2f(old_max - max);
    const Vec shrinks = Set1(shrink);
    int d = 0;
    for (; d + kLanes <= shape.value_dim; d += kLanes) Store(o + d, Mul(Load(o + d), shrinks));
    const int rest = shape.value_dim - d;
    if (rest > 0) StorePart(o + d, Mul(LoadPart(o + d, rest), shrinks), rest);
  }
  *state_max = max;
  *state_sum = *state_sum * shrink + ReduceAdd(Add(sum, sum_2));
}

inline void Softmax(const HeadShape& shape, const uint32_t* selected, float* scores,
                    const SoftmaxState& state) {
  for (int h = 0; h < shape.group; ++h) {
    float* const row = scores + int64_t{h} * shape.block;
    SoftmaxHead(
        shape, selected, shape.scale * kLog2E, row, state.o + int64_t{h} * shape.value_dim,
        state.max + h, state.sum + h, [](Vec x) { return Exp2(x); },
        [row](int i, Vec w, Vec w_2) {
          Store(row + i, w);
          Store(row + i + kLanes, w_2);
        });
  }
}

inline bool AnySelected(const HeadShape& shape, const uint32_t* selected) {
  if (!selected) return true;
  uint32_t any = 0;
  for (int i = 0; i < shape.block / 32; ++i) any |= selected[i];
  return any != 0;
}

template <int kCount>
struct Heads {
  static constexpr int kValue = kCount;
};

// Calls fn(Heads<n>, first) for runs of n heads that make up `group`, n a power of two up to kMost.
template <int kMost, typename Fn>
inline void ForHeads(int group, Fn fn) {
  int h = 0;
  for (; h + kMost <= group; h += kMost) fn(Heads<kMost>{}, h);
  if constexpr (kMost > 1) {
    ForHeads<kMost / 2>(group - h, [&](auto heads, int first) { fn(heads, h + first); });
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

// All scores of a block of grouped heads.
template <bool kBf16>
inline void BlockKeyScores(const HeadShape& shape, const uint8_t* keys, const float* q,
                           const uint32_t* selected, float* scores, Cursor& cursor) {
  const int64_t chunk_bytes = int64_t{kEntryTile} * shape.key_dim * (kBf16 ? 2 : 4);
  for (int entry = 0; entry < shape.block; entry += kEntryTile, keys += chunk_bytes) {
    if (selected && selected[entry / kEntryTile] == 0) continue;
    ForHeads<kMaxHeads>(shape.group, [&](auto heads, int first) {
      constexpr int kHeads = decltype(heads)::kValue;
      const float* const run = q + int64_t{first} * shape.key_dim;
      float* const out = scores + int64_t{first} * shape.block + entry;
      if (first == 0) {
        KeyScores<kBf16, kHeads, true>(keys, run, shape.key_dim, out, shape.block, cursor);
      } else {
        KeyScores<kBf16, kHeads, false>(keys, run, shape.key_dim, out, shape.block, cursor);
      }
    });
    cursor.Wrap();
  }
}

// All scores of a latent block.
template <bool kBf16>
inline void BlockLatentScores(const HeadShape& shape, const uint8_t* tiles, const float* q,
                              const uint32_t* selected, float* scores, Cursor& cursor) {
  const int64_t padded = RoundUp(shape.key_dim, kLanes);
  const int64_t chunk_bytes = int64_t{kEntryTile} * shape.key_dim * (kBf16 ? 2 : 4);
  for (int entry = 0; entry < shape.block; entry += kEntryTile, tiles += chunk_bytes) {
    if (selected && selected[entry / kEntryTile] == 0) continue;
    ForHeads<kLatentHeads>(shape.group, [&](auto heads, int first) {
      constexpr int kHeads = decltype(heads)::kValue;
      const float* const run = q + first * padded;
      float* const out = scores + int64_t{first} * shape.block + entry;
      if (first == 0) {
        LatentScores<kBf16, kHeads, true>(tiles, run, shape.key_dim, shape.value_dim, out,
                                          shape.block, cursor);
      } else {
        LatentScores<kBf16, kHeads, false>(tiles, run, shape.key_dim, shape.value_dim, out,
                                           shape.block, cursor);
      }
    });
    cursor.Wrap();
  }
}

// Adds the values of one chunk of 32 entries in up to 64 dims, of `stored` from there on. kVisits:
// 2 if the scores read them too.
template <bool kBf16, int kVisits>
inline void ChunkValues(const HeadShape& shape, const uint8_t* tiles, int stored, int dims,
                        const float* weights, float* o, Cursor& cursor) {
  constexpr int64_t kTileBytes = int64_t{kEntryTile} * kLanes * (kBf16 ? 2 : 4);
  ForHeads<kMaxHeads>(shape.group, [&](auto heads, int first) {
    constexpr int kHeads = decltype(heads)::kValue;
    constexpr int kTiles =
        kHeads * kValueTiles <= kMaxHeads * kValueTiles / 2 ? 2 * kValueTiles : kValueTiles;
    const float* const w = weights + int64_t{first} * shape.block;
    float* const out = o + int64_t{first} * shape.value_dim;
    const int64_t o_stride = shape.value_dim;
    const int64_t stride = shape.block;
    int d = 0;
    for (; d + kTiles * kLanes <= dims; d += kTiles * kLanes) {
      const uint8_t* const at = tiles + d / kLanes * kTileBytes;
      if (first > 0) {
        AddValues<kBf16, kHeads, kTiles, false, 0>(at, kLanes, kLanes, w, stride, out + d, o_stride,
                                                   cursor);
      } else {
        AddValues<kBf16, kHeads, kTiles, false, kTiles / kVisits>(at, kLanes, kLanes, w, stride,
                                                                  out + d, o_stride, cursor);
      }
    }
    for (; d + kLanes <= dims; d += kLanes) {
      AddValues<kBf16, kHeads, 1, false, 0>(tiles + d / kLanes * kTileBytes, kLanes, kLanes, w,
                                            stride, out + d, o_stride, cursor);
    }
    if (d < dims) {
      const int width = stored - d < kLanes ? stored - d : kLanes;
      AddValues<kBf16, kHeads, 1, true, 0>(tiles + d / kLanes * kTileBytes, width, dims - d, w,
                                           stride, out + d, o_stride, cursor);
    }
  });
}

// Adds the values of a block in panels of `panel` dims, of which the first value_dim are values.
template <bool kBf16, int kVisits>
inline void BlockValues(const HeadShape& shape, const uint8_t* values, int stored_dim, int panel,
                        const uint32_t* selected, const float* weights, float* o, Cursor& cursor) {
  constexpr int kItem = kBf16 ? 2 : 4;
  for (int first = 0; first < shape.value_dim; first += panel) {
    const int stored = stored_dim - first < panel ? stored_dim - first : panel;
    const int dims = shape.value_dim - first < panel ? shape.value_dim - first : panel;
    const uint8_t* chunk = values + int64_t{first} * shape.block * kItem;
    for (int entry = 0; entry < shape.block; entry += kEntryTile) {
      if (!selected || selected[entry / kEntryTile] != 0) {
        // All heads meet 64 dims while these are in the first-level cache.
        for (int d = 0; d < dims; d += kPanelDims) {
          ChunkValues<kBf16, kVisits>(shape, chunk + int64_t{d} * kEntryTile * kItem, stored - d,
                                      dims - d < kPanelDims ? dims - d : kPanelDims,
                                      weights + entry, o + first + d, cursor);
        }
        cursor.Wrap();
      }
      chunk += int64_t{kEntryTile} * stored * kItem;
    }
  }
}

inline int64_t SimdScratchBytes(const HeadShape& shape) {
  const int64_t q = shape.group * RoundUp(shape.key_dim, kLanes);
  return 4 * (RoundUp(q, kLanes) + RoundUp(int64_t{shape.group} * shape.block, kLanes));
}

template <bool kBf16>
inline void SimdAttend(const HeadShape& shape, const float* q, const HeadBlocks& blocks,
                       void* scratch, const SoftmaxState& state) {
  auto* const q_runs = static_cast<float*>(scratch);
  float* const scores = q_runs + RoundUp(shape.group * RoundUp(shape.key_dim, kLanes), kLanes);
  if (shape.value_in_key) {
    ArrangeLatentQuery(shape, q, q_runs);
  } else {
    ArrangeKeyQuery(shape, q, q_runs);
  }
  for (int i = 0; i < blocks.num_blocks; ++i) {
    const uint32_t* const selected =
        blocks.selected ? blocks.selected + int64_t{i} * (shape.block / 32) : nullptr;
    if (!AnySelected(shape, selected)) continue;
    const uint8_t* const head = blocks.blocks[i] + blocks.head_offset;
    Cursor cursor = MakeCursor(shape, blocks, i);
    if (shape.value_in_key) {
      BlockLatentScores<kBf16>(shape, head, q_runs, selected, scores, cursor);
      Softmax(shape, selected, scores, state);
      BlockValues<kBf16, 2>(shape, head, shape.key_dim, shape.key_dim, selected, scores, state.o,
                            cursor);
    } else {
      BlockKeyScores<kBf16>(shape, head, q_runs, selected, scores, cursor);
      Softmax(shape, selected, scores, state);
      const uint8_t* const values = head + int64_t{shape.block} * shape.key_dim * (kBf16 ? 2 : 4);
      BlockValues<kBf16, 1>(shape, values, shape.value_dim, kPanelDims, selected, scores, state.o,
                            cursor);
    }
  }
}

inline void Attend(const HeadShape& shape, const float* q, const HeadBlocks& blocks, void* scratch,
                   const SoftmaxState& state) {
  if (shape.bfloat16) {
    SimdAttend<true>(shape, q, blocks, scratch, state);
  } else {
    SimdAttend<false>(shape, q, blocks, scratch, state);
  }
}

inline void Read(const uint8_t* from, int64_t bytes, int64_t prefetch_bytes) {
  const int64_t ahead = prefetch_bytes == kOwnPrefetch ? 2048 : prefetch_bytes;
  Vec a = Zero(), b = Zero();
  const auto floats = [](const uint8_t* at) { return Load(reinterpret_cast<const float*>(at)); };
  for (int64_t i = 0; i < bytes; i += 256, from += 256) {
    for (int line = 0; line < 256; line += 64) Prefetch(from + ahead + line);
    a = Max(Max(a, floats(from)), floats(from + 64));
    b = Max(Max(b, floats(from + 128)), floats(from + 192));
  }
  // Or the compiler may see that nobody needs it.
  const float sum = ReduceMax(Max(a, b));
  asm volatile("" ::"m"(sum));
}

inline bool SupportsAll(const HeadShape&) { return true; }
