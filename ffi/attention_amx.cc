// AMX: tiles of 16 rows of 64 bytes, products of bfloat16 pairs, sums in float32. A kilobyte of a
// block is a tile as it lies. There is no store forwarding between tiles and vectors: what one
// phase writes the next one reads much later.
#include <immintrin.h>

#include "kernel.h"

namespace wscope {
namespace {

#include "vec_avx512.h"

constexpr int kPrefetchPages = 8;

#include "simd_rounded.h"

constexpr int64_t kPrefetchAhead = kPrefetchPages * kPage;  // Bytes, of grouped heads.
constexpr int kRows = 16;                                   // Of a tile.
constexpr int64_t kTile = 1024;                             // Bytes.
constexpr int kTileDims = 32;                               // Dims of a tile of queries or keys.
constexpr int kTileLines = 16;    // Prefetched with each tile of grouped heads.
constexpr int kSoftmaxLines = 2;  // Prefetched with each 32 weights of grouped heads.
// The tests run this file on processors without AMX.
#ifdef WSCOPE_EMULATE_TILES
#include "tests/emulated_tiles.h"
#else
#include "amx_tiles.h"
#endif

// Half a tile into the first-level cache.
inline void PrefetchNear(const uint8_t* from) {
  for (int line = 0; line < kTile / 128; ++line) {
    Prefetch<1>(from + 64 * line);
  }
}

// One or two neighbouring tiles of values in each chunk of 32 entries, the weights of the chunk,
// and where the sums lie.
struct ValueTiles {
  const uint8_t* tiles;
  int64_t chunk_bytes;
  const uint16_t* weights;
  int64_t weight_step;    // Numbers, from chunk to chunk.
  int64_t weight_stride;  // Bytes, from head to head.
  float* o;
  int64_t o_step;    // Numbers, from tile to tile.
  int64_t o_stride;  // Bytes, from head to head.
};

template <int kTiles, int kWeights, int kFirst, int kSecond, typename Fetch>
inline void AddChunk(const ValueTiles& in, int chunk, const uint32_t* selected, Fetch fetch) {
  if (selected && selected[chunk] == 0) return;
  const uint8_t* const at = in.tiles + chunk * in.chunk_bytes;
  LoadTile<kWeights>(in.weights + chunk * in.weight_step, in.weight_stride);
  LoadTileOnce<kFirst>(at, 64);
  Product<0, kWeights, kFirst>();
  fetch();
  if constexpr (kTiles > 1) {
    LoadTileOnce<kSecond>(at + kTile, 64);
    Product<1, kWeights, kSecond>();
    fetch();
  }
}

// o += weights * values; fetch() after each product. Tiles are taken in turns, so that no load
// waits for the product before it where another program shares the core (docs/kernel.md).
template <int kTiles, typename Fetch>
inline void AddSomeTiles(int chunks, const uint32_t* selected, const ValueTiles& in, Fetch fetch) {
  LoadTile<0>(in.o, in.o_stride);
  if constexpr (kTiles > 1) LoadTile<1>(in.o + in.o_step, in.o_stride);
  for (int chunk = 0; chunk < chunks; chunk += 3) {
    AddChunk<kTiles, 2, 5, 6>(in, chunk, selected, fetch);
    if (chunk + 1 < chunks) AddChunk<kTiles, 3, 7, 5>(in, chunk + 1, selected, fetch);
    if (chunk + 2 < chunks) AddChunk<kTiles, 4, 6, 7>(in, chunk + 2, selected, fetch);
  }
  StoreTile<0>(in.o, in.o_stride);
  if constexpr (kTiles > 1) StoreTile<1>(in.o + in.o_step, in.o_stride);
}

template <typename Fetch>
inline void AddTileValues(int tiles, int chunks, const uint32_t* selected, const ValueTiles& in,
                          Fetch fetch) {
  if (tiles == 1) {
    AddSomeTiles<1>(chunks, selected, in, fetch);
  } else {
    AddSomeTiles<2>(chunks, selected, in, fetch);
  }
}

#include "amx_grouped.h"
#include "amx_latent.h"

inline bool Supports(const HeadShape& shape) {
  if (!shape.bfloat16 || shape.value_dim % kLanes != 0) return false;
  return shape.key_dim % kTileDims == 0;
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
