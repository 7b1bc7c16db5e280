// AVX-512: products in float32, bfloat16 widened by a shift and a mask.
#include "kernel.h"

#include <immintrin.h>

namespace wscope {
namespace {

#include "vec_avx512.h"
#include "attention_simd.h"

}  // namespace

const Kernel kAvx512Kernel = {"avx512", true, nullptr, &SupportsAll, &SimdScratchBytes, &Attend, &Read};

}  // namespace wscope
