// What amx_tiles.h does, in plain code on memory of the thread. Included inside the anonymous
// namespace of a file.
#pragma once

inline float Widen(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t PairBits(const uint8_t* pair) {
  uint32_t bits;
  __builtin_memcpy(&bits, pair, sizeof(bits));
  return bits;
}
inline float FirstOfPair(const uint8_t* pair) { return Widen(PairBits(pair) << 16); }
inline float SecondOfPair(const uint8_t* pair) { return Widen(PairBits(pair) & 0xffff0000u); }

struct EmulatedTile {
  alignas(64) uint8_t bytes[1024];
};

struct EmulatedTiles {
  int rows[8];
  EmulatedTile tile[8];
};

inline EmulatedTiles& TheTiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

inline void Configure(int rows) {
  __builtin_memset(&TheTiles(), 0, sizeof(EmulatedTiles));
  for (int i = 0; i < 8; ++i) TheTiles().rows[i] = i < 5 ? rows : kRows;
}

inline void Release() { __builtin_memset(&TheTiles(), 0, sizeof(EmulatedTiles)); }

template <int kTo>
inline void LoadTile(const void* from, int64_t stride) {
  EmulatedTile& tile = TheTiles().tile[kTo];
  __builtin_memset(&tile, 0, sizeof(tile));
  for (int row = 0; row < TheTiles().rows[kTo]; ++row) {
    __builtin_memcpy(tile.bytes + 64 * row, static_cast<const uint8_t*>(from) + row * stride, 64);
  }
}

template <int kTo>
inline void LoadTileOnce(const void* from, int64_t stride) {
  LoadTile<kTo>(from, stride);
}

template <int kFrom>
inline void StoreTile(void* to, int64_t stride) {
  const EmulatedTile& tile = TheTiles().tile[kFrom];
  for (int row = 0; row < TheTiles().rows[kFrom]; ++row) {
    __builtin_memcpy(static_cast<uint8_t*>(to) + row * stride, tile.bytes + 64 * row, 64);
  }
}

template <int kTo>
inline void ClearTile() {
  __builtin_memset(&TheTiles().tile[kTo], 0, sizeof(EmulatedTile));
}

template <int kSum, int kA, int kB>
inline void Product() {
  EmulatedTiles& tiles = TheTiles();
  auto* const sum = reinterpret_cast<float*>(tiles.tile[kSum].bytes);
  for (int row = 0; row < tiles.rows[kA]; ++row) {
    for (int k = 0; k < tiles.rows[kB]; ++k) {
      for (int side = 0; side < 2; ++side) {
        const uint8_t* const a = tiles.tile[kA].bytes + 64 * row + 4 * k;
        const float factor = side == 0 ? FirstOfPair(a) : SecondOfPair(a);
        for (int column = 0; column < 16; ++column) {
          const uint8_t* const b = tiles.tile[kB].bytes + 64 * k + 4 * column;
          sum[16 * row + column] += factor * (side == 0 ? FirstOfPair(b) : SecondOfPair(b));
        }
      }
    }
  }
}
