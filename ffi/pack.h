// From entries, as a model computes them, to the blocks of a region: what layout.py's `pack` does.
#pragma once

#include <cstdint>

namespace wscope {

struct PackShape {
  int num_kv_heads = 0;  // G
  int key_dim = 0;       // K
  int value_dim = 0;     // V; 0 where the value lies in the key.
  int block = 0;         // D; a multiple of 32 for tiles.
  int item_bytes = 0;    // 2 or 4.
  bool tiles = false;    // The order TILES (kernel.h), else ROWS.
};

void PackBlocks(const PackShape& shape, int64_t num_blocks,
                const uint8_t* key,    // [num_blocks * D, G, K]
                const uint8_t* value,  // [num_blocks * D, G, V], or null
                uint8_t* out);         // [num_blocks, G, D * (K + V)]

// The moves that have instructions of their own, one table per instruction set.
struct PackMoves {
  // 16 rows of `count` 32-bit numbers, `row_bytes` apart, to [count][16].
  void (*turn)(const uint8_t* from, int64_t row_bytes, int count, uint8_t* to);
  // Two rows of 16 * `tiles` 16-bit numbers to pairs, 16 pairs to the same row of each tile of 1
  // KiB.
  void (*pair)(const uint8_t* even, const uint8_t* odd, int tiles, uint8_t* to);
};

extern const PackMoves kPortablePackMoves;
#if defined(__x86_64__)
extern const PackMoves kAvx2PackMoves;
extern const PackMoves kAvx512PackMoves;
#endif

// With these moves; for tests.
void PackBlocks(const PackMoves& moves, const PackShape& shape, int64_t num_blocks,
                const uint8_t* key, const uint8_t* value, uint8_t* out);

}  // namespace wscope
