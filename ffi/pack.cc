#include "pack.h"

#include <algorithm>
#include <cstring>

#include "kernel.h"

namespace wscope {
namespace {

constexpr int kPairTile = 1024;  // Bytes of a whole tile of pairs.

void Turn(const uint8_t* from, int64_t row_bytes, int count, uint8_t* to) {
  for (int row = 0; row < kLanes; ++row, from += row_bytes) {
    for (int i = 0; i < count; ++i) {
      std::memcpy(to + 4 * (i * kLanes + row), from + 4 * i, 4);
    }
  }
}

void Pair(const uint8_t* even, const uint8_t* odd, int count, uint8_t* to) {
  for (int i = 0; i < count; ++i) {
    std::memcpy(to + 4 * i, even + 2 * i, 2);
    std::memcpy(to + 4 * i + 2, odd + 2 * i, 2);
  }
}

void PairTiles(const uint8_t* even, const uint8_t* odd, int tiles, uint8_t* to) {
  for (int tile = 0; tile < tiles; ++tile) {
    Pair(even + 32 * tile, odd + 32 * tile, kLanes, to + tile * kPairTile);
  }
}

// Rows of one head: `row_bytes` from entry to entry, `dims` numbers each.
struct Rows {
  const uint8_t* from;
  int64_t row_bytes;
  int dims;
  int item_bytes;

  const uint8_t* At(int entry, int dim) const {
    return from + entry * row_bytes + dim * item_bytes;
  }
};

// The keys of 32 entries.
void PackKeys(const PackMoves& moves, const Rows& rows, int first, uint8_t* head) {
  const int pair = 4 / rows.item_bytes;
  const int count = rows.dims / pair;
  uint8_t* to = head + int64_t{first} * rows.dims * rows.item_bytes;
  for (int entry = first; entry < first + kEntryTile; entry += kLanes) {
    moves.turn(rows.At(entry, 0), rows.row_bytes, count, to);
    to += int64_t{count} * kLanes * 4;
    if (rows.dims % pair == 0) continue;
    for (int lane = 0; lane < kLanes; ++lane, to += rows.item_bytes) {
      std::memcpy(to, rows.At(entry + lane, rows.dims - 1), rows.item_bytes);
    }
  }
}

// 32 entries of the `dims` dims from `first` on, in tiles of 16 dims.
void PackChunk(const PackMoves& moves, const Rows& rows, int entry, int first, int dims,
               uint8_t* to) {
  const int tiles = dims / kLanes;
  const int rest = dims % kLanes;
  const int64_t tile_bytes = int64_t{kEntryTile} * kLanes * rows.item_bytes;
  uint8_t* const part = to + tiles * tile_bytes;
  if (rows.item_bytes == 2) {
    for (int i = 0; i < kEntryTile / 2; ++i) {
      const uint8_t* const even = rows.At(entry + 2 * i, first);
      const uint8_t* const odd = rows.At(entry + 2 * i + 1, first);
      moves.pair(even, odd, tiles, to + i * kLanes * 4);
      Pair(even + tiles * kLanes * 2, odd + tiles * kLanes * 2, rest, part + i * rest * 4);
    }
    return;
  }
  for (int i = 0; i < kEntryTile; ++i) {
    const uint8_t* const row = rows.At(entry + i, first);
    for (int tile = 0; tile < tiles; ++tile) {
      std::memcpy(to + tile * tile_bytes + i * kLanes * 4, row + tile * kLanes * 4, kLanes * 4);
    }
    std::memcpy(part + i * rest * 4, row + tiles * kLanes * 4, rest * 4);
  }
}

// 32 entries in panels of dims.
void PackPanels(const PackMoves& moves, const Rows& rows, int panel, int block, int entry,
                uint8_t* head) {
  for (int first = 0; first < rows.dims; first += panel) {
    const int dims = std::min(panel, rows.dims - first);
    const int64_t before = int64_t{first} * block + int64_t{entry} * dims;
    PackChunk(moves, rows, entry, first, dims, head + before * rows.item_bytes);
  }
}

void CopyRow(const Rows& rows, int entry, uint8_t* head) {
  const int64_t bytes = int64_t{rows.dims} * rows.item_bytes;
  std::memcpy(head + entry * bytes, rows.At(entry, 0), bytes);
}

const PackMoves& BestMoves() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return kAvx512PackMoves;
  }
  if (__builtin_cpu_supports("avx2")) return kAvx2PackMoves;
#endif
  return kPortablePackMoves;
}

}  // namespace

const PackMoves kPortablePackMoves = {&Turn, &PairTiles};

void PackBlocks(const PackMoves& moves, const PackShape& shape, int64_t num_blocks,
                const uint8_t* key, const uint8_t* value, uint8_t* out) {
  const int64_t key_bytes = int64_t{shape.key_dim} * shape.item_bytes;
  const int64_t value_bytes = int64_t{shape.value_dim} * shape.item_bytes;
  const int step = shape.tiles ? kEntryTile : 1;
  for (int64_t i = 0; i < num_blocks * shape.num_kv_heads; ++i) {
    const int64_t block = i / shape.num_kv_heads, head = i % shape.num_kv_heads;
    const int64_t at = block * shape.block * shape.num_kv_heads + head;
    const Rows keys{key + at * key_bytes, shape.num_kv_heads * key_bytes, shape.key_dim,
                    shape.item_bytes};
    const Rows values{value + at * value_bytes, shape.num_kv_heads * value_bytes, shape.value_dim,
                      shape.item_bytes};
    uint8_t* const to = out + i * shape.block * (key_bytes + value_bytes);
    uint8_t* const behind = to + shape.block * key_bytes;
    for (int entry = 0; entry < shape.block; entry += step) {
      if (!shape.tiles) {
        CopyRow(keys, entry, to);
      } else if (value) {
        PackKeys(moves, keys, entry, to);
      } else {
        PackPanels(moves, keys, shape.key_dim, shape.block, entry, to);
      }
    }
    for (int entry = 0; value && entry < shape.block; entry += step) {
      if (shape.tiles) {
        PackPanels(moves, values, kPanelDims, shape.block, entry, behind);
      } else {
        CopyRow(values, entry, behind);
      }
    }
  }
}

void PackBlocks(const PackShape& shape, int64_t num_blocks, const uint8_t* key,
                const uint8_t* value, uint8_t* out) {
  static const PackMoves& moves = BestMoves();
  PackBlocks(moves, shape, num_blocks, key, value, out);
}

}  // namespace wscope
