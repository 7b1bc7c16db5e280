// The tile registers. Included inside the anonymous namespace of a file.
#pragma once

// Palette 1: 64 bytes a row; tiles 0 to 4 have `rows` rows (a product takes time by the rows of its
// first factor), 5 to 7 all 16.
struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

inline void Configure(int rows) {
  TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 5 ? rows : kRows);
  }
  // Not the intrinsic: g++ 12 believes that it reads 8 bytes and drops the other stores.
  asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void Release() { asm volatile("tilerelease" ::: "memory"); }

template <int kTo>
inline void LoadTile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTo) : "memory");
}

// What the first-level cache need not keep: it keeps the queries, weights and sums that it has.
template <int kTo>
inline void LoadTileOnce(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTo) : "memory");
}

template <int kFrom>
inline void StoreTile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kFrom) : "memory");
}

template <int kTo>
inline void ClearTile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTo));
}

// kSum += kA * kB
template <int kSum, int kA, int kB>
inline void Product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}
