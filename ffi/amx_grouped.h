// Grouped heads in tiles. Included inside the anonymous namespace of attention_amx.cc.
// Scores: A = queries [R, 32 dims], B = keys [16 dim pairs][16 entries]. Values: A = weights
// [R, 32 entries], B = values [16 entry pairs][16 dims], C = o where it lies.
#pragma once

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

// One product of the scores of 16 entries, with the queries in tile kQuery.
template <int kQuery, int kKeys>
inline void ScoreStep(const uint8_t* keys, int lines, Cursor& cursor) {
  LoadTile<kKeys>(keys, 64);
  Product<4, kQuery, kKeys>();
  cursor.Lines(lines);
}

// The scores of 16 entries; tiles of keys in turns, from kKeys on.
template <int kSteps, int kKeys>
inline void GroupScores(const uint8_t* keys, const uint16_t* q, int steps, int lines, float* scores,
                        int64_t stride, Cursor& cursor) {
  constexpr int kNext = kKeys == 7 ? 5 : kKeys + 1;
  constexpr int kLast = kNext == 7 ? 5 : kNext + 1;
  ClearTile<4>();
  if constexpr (kSteps > 0) {
    ScoreStep<0, kKeys>(keys, lines, cursor);
    if constexpr (kSteps > 1) ScoreStep<1, kNext>(keys + kTile, lines, cursor);
    if constexpr (kSteps > 2) ScoreStep<2, kLast>(keys + 2 * kTile, lines, cursor);
    if constexpr (kSteps > 3) ScoreStep<3, kKeys>(keys + 3 * kTile, lines, cursor);
  } else {
    for (int i = 0; i < steps; ++i, keys += kTile) {
      LoadTile<0>(q + i * kTileDims, steps * 64);
      ScoreStep<0, kKeys>(keys, lines, cursor);
    }
  }
  StoreTile<4>(scores, stride);
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
                          const uint32_t* selected, int lines, float* scores, Cursor& cursor) {
  const int steps = shape.key_dim / kTileDims;
  const int64_t stride = int64_t{shape.block} * 4;
  if constexpr (kSteps > 0) LoadQueries<kSteps>(q);
  for (int entry = 0; entry < shape.block; entry += kLanes) {
    if (selected && selected[entry / kEntryTile] == 0) continue;
    const uint8_t* const at = keys + entry / kLanes * steps * kTile;
    const int turn = entry / kLanes % 3;
    if (turn == 0) {
      GroupScores<kSteps, 5>(at, q, steps, lines, scores + entry, stride, cursor);
    } else if (turn == 1) {
      GroupScores<kSteps, 6>(at, q, steps, lines, scores + entry, stride, cursor);
    } else {
      GroupScores<kSteps, 7>(at, q, steps, lines, scores + entry, stride, cursor);
    }
  }
}

inline void ScoresOfRun(const HeadShape& shape, const uint8_t* keys, const uint16_t* q,
                        const uint32_t* selected, int lines, float* scores, Cursor& cursor) {
  switch (shape.key_dim / kTileDims) {
    case 1:
      return GroupedScores<1>(shape, keys, q, selected, lines, scores, cursor);
    case 2:
      return GroupedScores<2>(shape, keys, q, selected, lines, scores, cursor);
    case 3:
      return GroupedScores<3>(shape, keys, q, selected, lines, scores, cursor);
    case 4:
      return GroupedScores<4>(shape, keys, q, selected, lines, scores, cursor);
    default:
      return GroupedScores<0>(shape, keys, q, selected, lines, scores, cursor);
  }
}

inline void GroupedValues(const HeadShape& shape, const uint8_t* values, const uint32_t* selected,
                          const uint16_t* weights, int lines, float* o, Cursor& cursor) {
  const int chunks = shape.block / kEntryTile;
  for (int first = 0; first < shape.value_dim; first += kPanelDims) {
    const int dims = shape.value_dim - first < kPanelDims ? shape.value_dim - first : kPanelDims;
    const int64_t chunk_bytes = int64_t{kEntryTile} * dims * 2;
    const uint8_t* const panel = values + int64_t{first} * shape.block * 2;
    for (int d = 0; d < dims; d += 2 * kLanes) {
      const ValueTiles tiles{
          panel + d / kLanes * kTile, chunk_bytes,   weights, kEntryTile,
          int64_t{shape.block} * 2,   o + first + d, kLanes,  int64_t{shape.value_dim} * 4};
      AddTileValues((dims - d) / kLanes, chunks, selected, tiles, [&] { cursor.Lines(lines); });
    }
  }
}

// Lines to prefetch with each tile of values, less than it has: the softmax took the others.
inline int ValueLines(const HeadShape& shape) {
  const int taken = shape.group * kSoftmaxLines * kLanes / shape.value_dim;
  return taken < kTileLines ? kTileLines - taken : 0;
}

inline void GroupedAttend(const HeadShape& shape, const float* q, const HeadBlocks& blocks,
                          void* memory, const SoftmaxState& state) {
  const GroupedScratch scratch = MakeGrouped(shape, memory);
  for (int64_t i = 0; i < int64_t{shape.group} * shape.key_dim; ++i) scratch.q[i] = Round(q[i]);
  const int run = shape.group < kRows ? shape.group : kRows;
  const int value_lines = ValueLines(shape);
  Configure(run);
  for (int i = 0; i < blocks.num_blocks; ++i) {
    const uint32_t* const selected =
        blocks.selected ? blocks.selected + int64_t{i} * (shape.block / 32) : nullptr;
    if (!AnySelected(shape, selected)) continue;
    const uint8_t* const keys = blocks.blocks[i] + blocks.head_offset;
    const uint8_t* const values = keys + int64_t{shape.block} * shape.key_dim * 2;
    Cursor cursor = MakeCursor(shape, blocks, i, kPrefetchAhead);
    // The last run of more than 16 heads may repeat some of the run before.
    for (int first = 0; first < shape.group; first += run) {
      const int64_t h = first + run <= shape.group ? first : shape.group - run;
      ScoresOfRun(shape, keys, scratch.q + h * shape.key_dim, selected, first == 0 ? kTileLines : 0,
                  scratch.scores + h * shape.block, cursor);
    }
    RoundedSoftmax(shape, selected, scratch.scores, scratch.weights, state, kSoftmaxLines, cursor);
    for (int first = 0; first < shape.group; first += run) {
      if (first > 0 && first + run > shape.group) Configure(shape.group - first);
      GroupedValues(shape, values, selected, scratch.weights + int64_t{first} * shape.block,
                    first == 0 ? value_lines : 0, state.o + int64_t{first} * shape.value_dim,
                    cursor);
    }
    if (shape.group % run != 0) Configure(run);
  }
  Release();
}
