// The attributes of a call that describe a layer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "attention.h"
#include "operands.h"
#include "status.h"

namespace wscope {

struct LayerAttributes {
  int32_t num_kv_heads, key_dim, value_dim, value_in_key, block;
  float scale;
  std::string_view storage;
};

inline Status ReadShape(const LayerAttributes& layer, const AnyBuffer& q, AttentionShape* shape) {
  if (layer.storage != "float32" && layer.storage != "bfloat16") {
    return Status::InvalidArgument("storage: is \"" + std::string(layer.storage) +
                                   "\", must be \"float32\" or \"bfloat16\"");
  }
  if (layer.value_in_key != 0 && layer.value_in_key != 1) {
    return Status::InvalidArgument("value_in_key: must be 0 or 1");
  }
  const int64_t num_q_heads = q.dimensions()[1];
  if (num_q_heads > INT32_MAX || q.dimensions()[2] != layer.key_dim) {
    return Status::InvalidArgument("q: is " + ShapeText(q) + ", the key_dim is " +
                                   std::to_string(layer.key_dim));
  }
  shape->num_q_heads = static_cast<int>(num_q_heads);
  shape->num_kv_heads = layer.num_kv_heads;
  shape->key_dim = layer.key_dim;
  shape->value_dim = layer.value_dim;
  shape->value_in_key = layer.value_in_key == 1;
  shape->block = layer.block;
  shape->storage = layer.storage == "float32" ? Storage::kFloat32 : Storage::kBfloat16;
  shape->scale = layer.scale;
  std::string wrong = CheckShape(*shape);
  return wrong.empty() ? Status::Ok() : Status::InvalidArgument(std::move(wrong));
}

}  // namespace wscope
