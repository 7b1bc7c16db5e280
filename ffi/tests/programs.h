// Decode steps by chance, for an engine on the host and one on the fake device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "attention.h"

namespace wscope {

using Numbers = std::vector<int32_t>;

constexpr int kLayers = 5;
constexpr int kSlots = 12;  // Of each pool; a step reads one half of them and stores to the other.
constexpr int kCapacity = 4;  // Slots of a chunk.
constexpr int kRows = 4;
constexpr int kBlocks = 6;  // Of a store's operand.
constexpr int kMostTurns = 3 * kLayers;

// 4 heads of 16 in bfloat16, blocks of a page; 3 heads of 20 in float32, blocks of 5/4 of one.
inline AttentionShape ShapeOf(int number) {
  if (number % 2 == 0) return {4, 2, 16, 16, false, 32, Storage::kBfloat16, 0.25f};
  return {3, 1, 20, 20, false, 32, Storage::kFloat32, 0.2f};
}

// What a step does, by chance.
struct Program {
  Program() = default;
  Program(unsigned seed, int half) {
    std::mt19937 random(seed);
    const auto below = [&](int end) { return static_cast<int>(random() % end); };
    row_ptr.push_back(0);
    for (int row = 0; row < kRows; ++row) {
      const int blocks = below(3) == 0 ? 0 : below(4);
      for (int i = 0; i < blocks; ++i) table.push_back(half * kSlots / 2 + below(kSlots / 2));
      row_ptr.push_back(static_cast<int32_t>(table.size()));
    }
    for (int layer = 0; layer < kLayers; ++layer) {
      jobs.insert(jobs.end(), {layer, below(2), 1 + below(kRows - 1)});
      turns.push_back(below(4));
      for (int turn = 0; turn < turns.back(); ++turn) {
        const int slots = below(kCapacity + 1);  // 0: a surplus turn.
        const int first = half * kSlots / 2 + below(kSlots / 2 - slots + 1);
        loads.insert(loads.end(), {layer, first, slots});
      }
      const int count = below(kBlocks);
      stores.insert(stores.end(), {layer, count});
      std::vector<int> slots{0, 1, 2, 3, 4, 5};
      std::shuffle(slots.begin(), slots.end(), random);
      for (int i = 0; i < count; ++i) {
        const int block = below(2) == 0 && i > 0
                              ? std::min(moves[moves.size() - 3] + 1, kBlocks - 1)
                              : below(kBlocks);
        moves.insert(moves.end(), {block, below(2), (1 - half) * kSlots / 2 + slots[i]});
      }
    }
    paired = below(2) == 0;
    values_seed = random();
  }

  Numbers jobs, row_ptr, table, loads, stores;
  Numbers moves;             // [X, 3]: block, 0 = unpinned or 1 = pinned, slot
  std::vector<int> turns;    // Loads of each layer.
  bool paired = false;       // Two jobs open at a time.
  unsigned values_seed = 0;  // Of q and the blocks.
};

}  // namespace wscope
