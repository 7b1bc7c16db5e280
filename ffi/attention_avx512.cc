// AVX-512: products in float32, bfloat16 widened by a shift and a mask.
#include <immintrin.h>

#include "kernel.h"

namespace wscope {
namespace {

#include "vec_avx512.h"

constexpr int64_t kPrefetchAhead = 8192;  // Bytes.
constexpr int kPrefetchPages = 1;

#include "simd_float.h"

}  // namespace

const Kernel kAvx512Kernel = {"avx512",           true,           1.0,  1, nullptr, &SupportsAll,
                              &FloatScratchBytes, &AttendInFloat, &Read};

}  // namespace wscope
