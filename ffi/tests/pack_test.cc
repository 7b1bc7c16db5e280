// Packing by every instruction set, against the index functions of tiles.h.
#include "pack.h"

#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "check.h"
#include "kernel.h"
#include "tiles.h"

namespace wscope {
namespace {

struct Number {
  const std::vector<uint8_t>& bytes;
  int item_bytes;
  uint32_t operator[](int64_t i) const {
    uint32_t number = 0;
    std::memcpy(&number, &bytes[i * item_bytes], item_bytes);
    return number;
  }
};

std::vector<uint8_t> Entries(int64_t count, int item_bytes, uint32_t first) {
  std::vector<uint8_t> bytes(count * item_bytes);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t number = first + static_cast<uint32_t>(i) * 2654435761u;
    std::memcpy(&bytes[i * item_bytes], &number, item_bytes);
  }
  return bytes;
}

// Where dim `d` of the key or value of an entry belongs in its head.
int64_t PlaceOf(const PackShape& shape, bool of_key, int entry, int d) {
  const int64_t keys = int64_t{shape.block} * shape.key_dim;
  const bool pairs = shape.item_bytes == 2;
  if (!shape.tiles) {
    return of_key ? int64_t{entry} * shape.key_dim + d
                  : keys + int64_t{entry} * shape.value_dim + d;
  }
  if (!of_key) return keys + ValueIndex(shape.value_dim, kPanelDims, shape.block, pairs, entry, d);
  if (shape.value_dim > 0) return KeyIndex(shape.key_dim, pairs, entry, d);
  return ValueIndex(shape.key_dim, shape.key_dim, shape.block, pairs, entry, d);
}

void TestShape(const PackMoves& moves, const PackShape& shape) {
  const int blocks = 2;
  const int64_t rows = int64_t{blocks} * shape.block * shape.num_kv_heads;
  const std::vector<uint8_t> key = Entries(rows * shape.key_dim, shape.item_bytes, 1);
  const std::vector<uint8_t> value = Entries(rows * shape.value_dim, shape.item_bytes, 77);
  const int64_t head = int64_t{shape.block} * (shape.key_dim + shape.value_dim);
  std::vector<uint8_t> out(blocks * shape.num_kv_heads * head * shape.item_bytes);
  PackBlocks(moves, shape, blocks, key.data(), shape.value_dim > 0 ? value.data() : nullptr,
             out.data());
  const Number got{out, shape.item_bytes}, keys{key, shape.item_bytes},
      values{value, shape.item_bytes};
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t h = row % shape.num_kv_heads;
    const int64_t entry = row / shape.num_kv_heads;
    const int64_t begin = (entry / shape.block * shape.num_kv_heads + h) * head;
    const int at = static_cast<int>(entry % shape.block);
    for (int d = 0; d < shape.key_dim; ++d) {
      CHECK(got[begin + PlaceOf(shape, true, at, d)] == keys[row * shape.key_dim + d]);
    }
    for (int d = 0; d < shape.value_dim; ++d) {
      CHECK(got[begin + PlaceOf(shape, false, at, d)] == values[row * shape.value_dim + d]);
    }
  }
}

void TestMoves(const PackMoves& moves) {
  struct Dims {
    int heads, key, value;
  };
  const Dims all[] = {{2, 128, 128}, {1, 64, 64}, {3, 33, 65}, {1, 1, 1},   {2, 20, 20},
                      {1, 24, 40},   {1, 576, 0}, {2, 37, 0},  {1, 16, 16}, {1, 47, 79}};
  for (const Dims& dims : all) {
    for (const int item_bytes : {2, 4}) {
      for (const bool tiles : {false, true}) {
        for (const int block : {32, 64}) {
          TestShape(moves, {dims.heads, dims.key, dims.value, block, item_bytes, tiles});
        }
      }
    }
  }
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::TestMoves(wscope::kPortablePackMoves);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) wscope::TestMoves(wscope::kAvx2PackMoves);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    wscope::TestMoves(wscope::kAvx512PackMoves);
  }
#endif
}
