// Where a number lies in a block: see kernel.h for the order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernel.h"

namespace wscope {

// Index of dim `d` of entry `e` among numbers in key order.
inline int64_t KeyIndex(int key_dim, bool bfloat16, int e, int d) {
  const int pair = bfloat16 ? 2 : 1;
  const int64_t group = int64_t{e / kLanes} * kLanes * key_dim;
  const int lane = e % kLanes;
  if (d >= key_dim - key_dim % pair) return group + int64_t{d} * kLanes + lane;
  return group + int64_t{d - d % pair} * kLanes + lane * pair + d % pair;
}

// Index of dim `d` of entry `e` among numbers in value order, in panels of `panel` dims.
inline int64_t ValueIndex(int value_dim, int panel, int block, bool bfloat16, int e, int d) {
  const int pair = bfloat16 ? 2 : 1;
  const int panel_begin = d - d % panel;
  const int panel_dims = std::min(panel, value_dim - panel_begin);
  const int tile_begin = d % panel / kLanes * kLanes;
  const int tile_dims = std::min(kLanes, panel_dims - tile_begin);
  const int entry = e % kEntryTile;
  int64_t index = int64_t{panel_begin} * block;
  index += int64_t{e / kEntryTile} * kEntryTile * panel_dims;
  index += int64_t{tile_begin} * kEntryTile;
  index += int64_t{entry / pair} * tile_dims * pair;
  return index + (d % panel - tile_begin) * pair + entry % pair;
}

}  // namespace wscope
