// Packing with AVX2.
#include <immintrin.h>

#include "kernel.h"
#include "pack.h"

namespace wscope {
namespace {

inline __m256i Load(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline void Store(uint8_t* to, __m256i x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
}

// 8 rows of 8 32-bit numbers, to columns that lie 64 bytes apart.
inline void TurnEight(const uint8_t* from, int64_t row_bytes, uint8_t* to) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = Load(from + i * row_bytes);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    Store(to + 64 * i, _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
    Store(to + 64 * (i + 4), _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
  }
}

inline void Turn(const uint8_t* from, int64_t row_bytes, int count, uint8_t* to) {
  for (; count >= 8; count -= 8, from += 32, to += 512) {
    TurnEight(from, row_bytes, to);
    TurnEight(from + 8 * row_bytes, row_bytes, to + 32);
  }
  if (count > 0) kPortablePackMoves.turn(from, row_bytes, count, to);
}

inline void Pair(const uint8_t* even, const uint8_t* odd, int tiles, uint8_t* to) {
  for (int tile = 0; tile < tiles; ++tile, even += 32, odd += 32, to += 1024) {
    // In the middle two quarters change places, so that each half stays in its 128 bits.
    const __m256i a = _mm256_permute4x64_epi64(Load(even), 0xd8);
    const __m256i b = _mm256_permute4x64_epi64(Load(odd), 0xd8);
    Store(to, _mm256_unpacklo_epi16(a, b));
    Store(to + 32, _mm256_unpackhi_epi16(a, b));
  }
}

}  // namespace

const PackMoves kAvx2PackMoves = {&Turn, &Pair};

}  // namespace wscope
