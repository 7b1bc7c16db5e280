// AVX2 and FMA: the vectors of 16 are pairs of registers.
#include <immintrin.h>

#include "kernel.h"

namespace wscope {
namespace {

struct Vec {
  __m256 low, high;
};

constexpr int64_t kPrefetchAhead = 16384;  // Bytes.
constexpr int kPrefetchPages = 1;
constexpr int kMaxHeads = 4;
constexpr int kLatentHeads = 4;
constexpr int kValueTiles = 1;
constexpr int kKeySums = 4;

inline Vec Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec Set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec Load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void Store(float* to, Vec x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}
// All ones in the lanes below `count`.
inline __m256i First(int count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes);
}
inline Vec LoadPart(const float* from, int count) {
  const __m256 low = _mm256_maskload_ps(from, First(count));
  // Beyond the end not even the address is formed.
  return {low, count > 8 ? _mm256_maskload_ps(from + 8, First(count - 8)) : _mm256_setzero_ps()};
}
inline void StorePart(float* to, Vec x, int count) {
  _mm256_maskstore_ps(to, First(count), x.low);
  if (count > 8) _mm256_maskstore_ps(to + 8, First(count - 8), x.high);
}
inline Vec Add(Vec a, Vec b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Vec Mul(Vec a, Vec b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Vec Fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Vec Max(Vec a, Vec b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline __m256 Select8(uint32_t bits, __m256 a, __m256 b) {
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lanes);
  return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lanes)));
}
inline Vec Select(uint32_t bits, Vec a, Vec b) {
  return {Select8(bits & 0xff, a.low, b.low), Select8(bits >> 8, a.high, b.high)};
}
// One register: twice as many heads at a time.
using Sum = __m256;
inline Sum AddProduct(Vec a, Vec b, Sum sum) {
  return _mm256_fmadd_ps(a.high, b.high, _mm256_fmadd_ps(a.low, b.low, sum));
}
inline float ReduceAdd(Sum eight) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float ReduceAdd(Vec x) { return ReduceAdd(_mm256_add_ps(x.low, x.high)); }
inline float ReduceMax(Vec x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline __m256 LowHalves(__m256i row) { return _mm256_castsi256_ps(_mm256_slli_epi32(row, 16)); }
inline __m256 HighHalves(__m256i row) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(row, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline __m256i LoadBits(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
// A row of bfloat16: the first of each pair is the low half of its 32 bits.
inline Vec Even(const uint8_t* row) {
  return {LowHalves(LoadBits(row)), LowHalves(LoadBits(row + 32))};
}
inline Vec Odd(const uint8_t* row) {
  return {HighHalves(LoadBits(row)), HighHalves(LoadBits(row + 32))};
}
inline Vec EvenPart(const uint8_t* row, int count) {
  const Vec bits = LoadPart(reinterpret_cast<const float*>(row), count);
  return {LowHalves(_mm256_castps_si256(bits.low)), LowHalves(_mm256_castps_si256(bits.high))};
}
inline Vec OddPart(const uint8_t* row, int count) {
  const Vec bits = LoadPart(reinterpret_cast<const float*>(row), count);
  return {HighHalves(_mm256_castps_si256(bits.low)), HighHalves(_mm256_castps_si256(bits.high))};
}
// 16 numbers of bfloat16.
inline Vec LoadHalves(const uint8_t* from) {
  const auto* const halves = reinterpret_cast<const __m128i*>(from);
  return {LowHalves(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves))),
          LowHalves(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1)))};
}

// 2^x for x <= 0, exactly 0 below -126, by a polynomial on [-1/2, 1/2]: relative error 2e-7.
inline __m256 Exp2Eight(__m256 x) {
  const __m256 least = _mm256_set1_ps(-126.0f);
  const __m256 is_zero = _mm256_cmp_ps(x, least, _CMP_LT_OQ);
  x = _mm256_max_ps(x, least);
  const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 r = _mm256_sub_ps(x, n);
  __m256 y = _mm256_set1_ps(0.00015345812f);
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(0.00133999312f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(0.00961848896f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(0.0555032878f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(0.240226469f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(0.693147206f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
  return _mm256_andnot_ps(is_zero, y);
}
inline Vec Exp2(Vec x) { return {Exp2Eight(x.low), Exp2Eight(x.high)}; }

#include "simd_float.h"

}  // namespace

const Kernel kAvx2Kernel = {"avx2",         true, 1.0, 1, nullptr, &SupportsAll, &FloatScratchBytes,
                            &AttendInFloat, &Read};

}  // namespace wscope
