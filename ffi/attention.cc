#include "attention.h"

#include <utility>

#include "size_math.h"

namespace wscope {

std::string CheckShape(const AttentionShape& shape) {
  const std::pair<const char*, int> positive[] = {{"num_q_heads", shape.num_q_heads},
                                                  {"num_kv_heads", shape.num_kv_heads},
                                                  {"key_dim", shape.key_dim},
                                                  {"value_dim", shape.value_dim},
                                                  {"block", shape.block}};
  for (const auto& [name, value] : positive) {
    if (value < 1) {
      return std::string(name) + ": is " + std::to_string(value) + ", must be at least 1";
    }
  }
  if (shape.num_q_heads % shape.num_kv_heads != 0) {
    return "num_q_heads: " + std::to_string(shape.num_q_heads) + " is not a multiple of the " +
           std::to_string(shape.num_kv_heads) + " kv heads";
  }
  if (shape.value_in_key && shape.value_dim > shape.key_dim) {
    return "value_dim: " + std::to_string(shape.value_dim) + " is more than the key_dim " +
           std::to_string(shape.key_dim) + " that the value is part of";
  }
  if (!CheckedProduct(
          {shape.num_kv_heads, shape.block, shape.stored_dim(), ItemBytes(shape.storage)})) {
    return "block: the bytes of a block overflow 64 bits";
  }
  return {};
}

}  // namespace wscope
