// AVX-512: products in float32, bfloat16 widened by a shift and a mask.
#include <immintrin.h>

#include "kernel.h"

namespace wscope {
namespace {

constexpr auto kPrefetchHint = _MM_HINT_T0;

#include "vec_avx512.h"

constexpr int64_t kPrefetchAhead = 8192;  // Bytes.

#include "simd_float.h"

}  // namespace

const Kernel kAvx512Kernel = {"avx512",           true,           1.0,  1, nullptr, &SupportsAll,
                              &FloatScratchBytes, &AttendInFloat, &Read};

}  // namespace wscope
