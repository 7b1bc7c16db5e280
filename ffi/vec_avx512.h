// 16 floats in one register. Included inside the anonymous namespace of a file, which has defined
// kPrefetchHint.

using Vec = __m512;

constexpr int kMaxHeads = 8;
constexpr int kLatentHeads = 8;
constexpr int kValueTiles = 2;

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
inline float ReduceAdd(Vec x) { return _mm512_reduce_add_ps(x); }
inline float ReduceMax(Vec x) { return _mm512_reduce_max_ps(x); }
inline void Prefetch(const uint8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), kPrefetchHint);
}

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

// x = n + r, n whole and r in [-1/2, 1/2]; far below zero x is cut where 2^x is 0.
inline Vec Split(Vec x, Vec* n) {
  x = _mm512_max_ps(x, Set1(-200.0f));
  *n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_sub_ps(x, *n);
}

// 2^x for x <= 0, exactly 0 below -150; relative error 1e-7: the minimax polynomial of degree 6 on
// [-1/2, 1/2] is good to 2e-9, the rest is rounding.
inline Vec Exp2(Vec x) {
  Vec n;
  const Vec r = Split(x, &n);
  Vec y = Set1(0.00015345812f);
  y = Fma(y, r, Set1(0.00133999312f));
  y = Fma(y, r, Set1(0.00961848896f));
  y = Fma(y, r, Set1(0.0555032878f));
  y = Fma(y, r, Set1(0.240226469f));
  y = Fma(y, r, Set1(0.693147206f));
  y = Fma(y, r, Set1(1.0f));
  return _mm512_scalef_ps(y, n);
}

// The same to 7.5e-5 (degree 3), for weights that are rounded to bfloat16 (4e-3) anyway.
inline Vec RoughExp2(Vec x) {
  Vec n;
  const Vec r = Split(x, &n);
  Vec y = Set1(0.0551716691f);
  y = Fma(y, r, Set1(0.242611122f));
  y = Fma(y, r, Set1(0.693260985f));
  y = Fma(y, r, Set1(0.999928074f));
  return _mm512_scalef_ps(y, n);
}
