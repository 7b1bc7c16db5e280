// What push() refuses, and that its text names the array and the row.
#include "plan.h"

#include <climits>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"

namespace wscope {
namespace {

using Numbers = std::vector<int32_t>;

// A plan that can be carried out, to be spoilt: two rows with 2 and 1 blocks.
struct Arrays {
  int host_pool, load_pool;
  Numbers jobs{0, 0, 2, 1, 1, 1};
  Numbers row_ptr{0, 2, 3};
  Numbers table{3, 0, 1};
  Numbers loads{0, 0, 4, 1, 1, 3, 5, 9, 0};
  Numbers stores{0, 1, 1, 2};
  Numbers moves{0, 0, 0, 5, 0, 1, 6, 1, 3};

  PlanArrays Get() const {
    const auto rows = [](const Numbers& numbers, int64_t columns) {
      return PlanArrays::Table{numbers.data(), static_cast<int64_t>(numbers.size()) / columns};
    };
    return {rows(jobs, 3), host_pool,      rows(row_ptr, 1), rows(table, 1),
            load_pool,     rows(loads, 3), rows(stores, 2),  rows(moves, 3)};
  }
};

struct TwoPools {
  TwoPools() {
    host->Commit(4);
    link->Commit(4);
  }
  ~TwoPools() {
    Pools().Remove(host_id);
    Pools().Remove(link_id);
  }
  std::shared_ptr<Pool> host = std::make_shared<Pool>(2, 8, 64);
  std::shared_ptr<Pool> link = std::make_shared<Pool>(2, 8, 64);
  int host_id = Pools().Add(host);
  int link_id = Pools().Add(link);
};

void TestGood() {
  TwoPools pools;
  const Plan plan = BuildPlan(Arrays{pools.host_id, pools.link_id}.Get());
  CHECK(plan.jobs.size() == 2 && plan.jobs[1].layer == 1 && plan.jobs[1].first_row == 1);
  CHECK(plan.row_ptr == (Numbers{0, 2, 3}) && plan.table == (Numbers{3, 0, 1}));
  CHECK(plan.loads.size() == 3 && plan.loads[1].num_slots == 3);
  CHECK(plan.stores.size() == 2 && plan.stores[1].moves.size() == 2);
  CHECK(plan.stores[1].moves[0].pool == pools.host && plan.stores[1].moves[1].pool == pools.link);
  CHECK(plan.host_pool == pools.host && plan.load_pool == pools.link);
}

void TestNothing() {
  const Plan plan = BuildPlan({});
  CHECK(plan.jobs.empty() && plan.row_ptr == Numbers{0} && !plan.host_pool && !plan.load_pool);
  // Rows without blocks and empty turns need no pool.
  Arrays arrays{-1, -1};
  arrays.row_ptr = {0, 0, 0};
  arrays.table = {};
  arrays.loads = {0, 0, 0};
  arrays.stores = {0, 0};
  arrays.moves = {};
  CHECK(BuildPlan(arrays.Get()).jobs.size() == 2);
}

void TestRefusals() {
  struct Bad {
    std::function<void(Arrays&)> spoil;
    const char* text;
  };
  const std::vector<Bad> all = {
      {[](Arrays& a) { a.host_pool = 99; }, "host_pool is 99"},
      {[](Arrays& a) { a.host_pool = -2; }, "host_pool is -2"},
      {[](Arrays& a) { a.host_pool = -1; }, "host_pool is -1"},
      {[](Arrays& a) { a.load_pool = -1; }, "loads[0]: it has slots"},
      {[](Arrays& a) { a.row_ptr[0] = 1; }, "begin with 0"},
      {[](Arrays& a) { a.row_ptr[1] = 4; }, "table_ptr[2]"},
      {[](Arrays& a) { a.row_ptr[1] = -1; }, "table_ptr[1]"},
      {[](Arrays& a) { a.row_ptr[2] = 2; }, "ends with 2"},
      {[](Arrays& a) { a.row_ptr = {}; }, "ends with 0"},
      {[](Arrays& a) { a.table[1] = 4; }, "table[1]: slot is 4"},
      {[](Arrays& a) { a.table[2] = -1; }, "table[2]: slot is -1"},
      {[](Arrays& a) { a.jobs[0] = 2; }, "jobs[0]: layer is 2"},
      {[](Arrays& a) { a.jobs[3] = -1; }, "jobs[1]: layer is -1"},
      {[](Arrays& a) { a.jobs[5] = 2; }, "jobs[1]: rows"},
      {[](Arrays& a) { a.jobs[4] = -1; }, "jobs[1]: rows"},
      {[](Arrays& a) { a.jobs[5] = -1; }, "jobs[1]: num_rows"},
      {[](Arrays& a) { a.jobs[4] = a.jobs[5] = INT_MAX; }, "jobs[1]: rows"},
      {[](Arrays& a) { a.loads[2] = 5; }, "loads[0]: slots"},
      {[](Arrays& a) { a.loads[4] = -1; }, "loads[1]: slots"},
      {[](Arrays& a) { a.loads[5] = -1; }, "loads[1]: num_slots"},
      {[](Arrays& a) { a.loads[3] = 2; }, "loads[1]: layer is 2"},
      {[](Arrays& a) { a.stores[1] = -1; }, "stores[0]: num_moves"},
      {[](Arrays& a) { a.stores[3] = 3; }, "stores[1]: moves"},
      {[](Arrays& a) { a.stores[3] = 1; }, "moves has 3 rows"},
      {[](Arrays& a) { a.stores[2] = 2; }, "stores[1]: layer is 2"},
      {[](Arrays& a) { a.moves[0] = -1; }, "moves[0]: block"},
      {[](Arrays& a) { a.moves[4] = 50; }, "moves[1]: pool is 50"},
      {[](Arrays& a) { a.moves[4] = -1; }, "moves[1]: pool is -1"},
      {[](Arrays& a) { a.moves[8] = 4; }, "moves[2]: slot is 4"},
  };
  TwoPools pools;
  for (const Bad& bad : all) {
    Arrays arrays{pools.host_id, pools.link_id};
    bad.spoil(arrays);
    CHECK(Throws<std::invalid_argument>([&] { BuildPlan(arrays.Get()); }, bad.text));
  }
}

// Only the numbers are freed: a plan keeps the memory it names.
void TestHoldsPools() {
  auto pools = std::make_unique<TwoPools>();
  const Arrays arrays{pools->host_id, pools->link_id};
  const Plan plan = BuildPlan(arrays.Get());
  pools.reset();
  plan.host_pool->Block(1, 3)[63] = 1;
  CHECK(Throws<std::invalid_argument>([&] { BuildPlan(arrays.Get()); }, "no open pool"));
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::TestGood();
  wscope::TestNothing();
  wscope::TestRefusals();
  wscope::TestHoldsPools();
}
