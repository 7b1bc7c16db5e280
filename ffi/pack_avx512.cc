// Packing with AVX-512.
#include <immintrin.h>

#include "kernel.h"
#include "pack.h"

namespace wscope {
namespace {

#include "vec_avx512.h"

inline void Turn(const uint8_t* from, int64_t row_bytes, int count, uint8_t* to) {
  for (; count > 0; count -= kLanes, from += 64, to += 1024) {
    const __mmask16 dims = count < kLanes ? First(count) : First(kLanes);
    __m512i rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_maskz_loadu_epi32(dims, from + i * row_bytes);
    Transpose(rows);
    for (int i = 0; i < 16 && i < count; ++i) _mm512_storeu_si512(to + 64 * i, rows[i]);
  }
}

inline void Pair(const uint8_t* even, const uint8_t* odd, int tiles, uint8_t* to) {
  for (int tile = 0; tile < tiles; ++tile, even += 32, odd += 32, to += 1024) {
    const __m512i low =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
    const __m512i high =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
}

}  // namespace

const PackMoves kAvx512PackMoves = {&Turn, &Pair};

}  // namespace wscope
