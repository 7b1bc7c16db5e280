// What the calls of one program are to do, in their order: pushed before the program is dispatched.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pool.h"

namespace wscope {

// A plan as it comes from Python; borrowed. A pool number of -1 means none.
struct PlanArrays {
  struct Table {
    const int32_t* data = nullptr;
    int64_t rows = 0;
  };

  Table jobs;  // [J, 3]: layer, first row, number of rows
  int host_pool = -1;
  Table row_ptr;  // [B + 1]: where the slots of a row begin in `table`
  Table table;    // [n]: slots of the host pool
  int load_pool = -1;
  Table loads;   // [M, 3]: layer, first slot, number of slots
  Table stores;  // [S, 2]: layer, number of moves
  Table moves;   // [X, 3]: block of the operand, pool, slot; those of all stores in order
};

struct Plan {
  struct Job {
    int layer, first_row, num_rows;
  };
  struct Load {
    int layer, first_slot, num_slots;
  };
  struct Move {
    int block;
    std::shared_ptr<Pool> pool;
    int slot;
  };
  struct Store {
    int layer;
    std::vector<Move> moves;
  };

  std::vector<Job> jobs;
  std::shared_ptr<Pool> host_pool;  // Null: no job has a block.
  std::vector<int32_t> row_ptr;
  std::vector<int32_t> table;
  std::shared_ptr<Pool> load_pool;  // Null: no load has a slot.
  std::vector<Load> loads;
  std::vector<Store> stores;
};

// Checks every number against the pools as they are now and takes hold of the pools, so that the
// plan stays good. Throws std::invalid_argument that names the array, the row and the range.
Plan BuildPlan(const PlanArrays& arrays);

}  // namespace wscope
