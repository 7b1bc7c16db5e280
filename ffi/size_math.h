// Arithmetic on sizes that says when it overflows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>

namespace wscope {

// Product of non-negative factors; nothing if one is negative or the product does not fit int64.
inline std::optional<int64_t> CheckedProduct(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (const int64_t factor : factors) {
    if (factor < 0 || __builtin_mul_overflow(product, factor, &product)) return std::nullopt;
  }
  return product;
}

// a + b of non-negative terms; nothing if one is negative or the sum does not fit int64.
inline std::optional<int64_t> CheckedSum(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (a < 0 || b < 0 || __builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

// Smallest multiple of `unit` that is at least `value`; nothing if it does not fit int64.
inline std::optional<int64_t> CheckedRoundUp(int64_t value, int64_t unit) {
  const std::optional<int64_t> padded = CheckedSum(value, unit - 1);
  if (!padded) return std::nullopt;
  return *padded / unit * unit;
}

}  // namespace wscope
