// AVX-512: products in float32, bfloat16 widened by a shift and a mask.
#include <immintrin.h>

#include "kernel.h"

namespace wscope {
namespace {

constexpr auto kPrefetchHint = _MM_HINT_T0;

#include "vec_avx512.h"

constexpr int64_t kPrefetchAhead = 8192;  // Bytes.

#include "simd_float.h"

inline int64_t FloatScratchBytes(const HeadShape& shape) {
  return ScratchSize<FloatNumbers<true>>(shape);
}

inline void AttendInFloat(const HeadShape& shape, const float* q, const HeadBlocks& blocks,
                          void* scratch, const SoftmaxState& state) {
  if (shape.bfloat16) {
    AttendWith<FloatNumbers<true>>(shape, q, blocks, scratch, state);
  } else {
    AttendWith<FloatNumbers<false>>(shape, q, blocks, scratch, state);
  }
}

inline bool SupportsAll(const HeadShape&) { return true; }

}  // namespace

const Kernel kAvx512Kernel = {"avx512",           true,           1.0,  1, nullptr, &SupportsAll,
                              &FloatScratchBytes, &AttendInFloat, &Read};

}  // namespace wscope
