// 16 floats in one register. Included inside the anonymous namespace of a file.
#pragma once

using Vec = __m512;

constexpr int kMaxHeads = 8;
constexpr int kLatentHeads = 8;
constexpr int kValueTiles = 2;
constexpr int kKeySums = 16;

inline Vec Zero() { return _mm512_setzero_ps(); }
inline Vec Set1(float x) { return _mm512_set1_ps(x); }
inline Vec Load(const float* from) { return _mm512_loadu_ps(from); }
inline void Store(float* to, Vec x) { _mm512_storeu_ps(to, x); }
inline __mmask16 First(int count) { return static_cast<__mmask16>((1u << count) - 1); }
inline Vec LoadPart(const float* from, int count) {
  return _mm512_maskz_loadu_ps(First(count), from);
}
inline void StorePart(float* to, Vec x, int count) { _mm512_mask_storeu_ps(to, First(count), x); }
inline Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec Mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec Max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec Select(uint32_t bits, Vec a, Vec b) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), b, a);
}
using Sum = Vec;
inline Sum AddProduct(Vec a, Vec b, Sum sum) { return Fma(a, b, sum); }
inline float ReduceAdd(Vec x) { return _mm512_reduce_add_ps(x); }
inline float ReduceMax(Vec x) { return _mm512_reduce_max_ps(x); }

// A row of bfloat16: the first of each pair is the low half of its 32 bits.
inline Vec LowHalves(__m512i row) { return _mm512_castsi512_ps(_mm512_slli_epi32(row, 16)); }
inline Vec HighHalves(__m512i row) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(row, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Vec Even(const uint8_t* row) { return LowHalves(_mm512_loadu_si512(row)); }
inline Vec Odd(const uint8_t* row) { return HighHalves(_mm512_loadu_si512(row)); }
inline Vec EvenPart(const uint8_t* row, int count) {
  return LowHalves(_mm512_maskz_loadu_epi32(First(count), row));
}
inline Vec OddPart(const uint8_t* row, int count) {
  return HighHalves(_mm512_maskz_loadu_epi32(First(count), row));
}
// 16 numbers of bfloat16.
inline Vec LoadHalves(const uint8_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return LowHalves(_mm512_cvtepu16_epi32(halves));
}

// The fraction of x, in [0, 1]; 0 of -inf.
inline Vec Fraction(Vec x) {
  return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

// 2^x for x <= 0; relative error 1.5e-7: the minimax polynomial of degree 5 on [0, 1] is good to
// 7.5e-8, the rest is rounding.
inline Vec Exp2(Vec x) {
  const Vec r = Fraction(x);
  Vec y = Set1(0.00187757669f);
  y = Fma(y, r, Set1(0.00898933969f));
  y = Fma(y, r, Set1(0.0558263175f));
  y = Fma(y, r, Set1(0.240153611f));
  y = Fma(y, r, Set1(0.693153083f));
  y = Fma(y, r, Set1(0.99999994f));
  return _mm512_scalef_ps(y, x);  // By the whole part of x.
}

// The same to 7.5e-5 (degree 3), for weights that are rounded to bfloat16 (4e-3) anyway.
inline Vec RoughExp2(Vec x) {
  const Vec r = Fraction(x);
  Vec y = Set1(0.0780245215f);
  y = Fma(y, r, Set1(0.226067156f));
  y = Fma(y, r, Set1(0.695833564f));
  y = Fma(y, r, Set1(0.999925196f));
  return _mm512_scalef_ps(y, x);
}

// 16 rows of 16 32-bit numbers, to columns.
inline void Transpose(__m512i* rows) {
  __m512i a[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
    rows[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
  }
}
