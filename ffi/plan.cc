#include "plan.h"

#include <map>
#include <stdexcept>
#include <string>

#include "size_math.h"

namespace wscope {
namespace {

using Table = PlanArrays::Table;

[[noreturn]] void Refuse(const std::string& text) { throw std::invalid_argument("push: " + text); }

// `what` has the form "jobs[3]: layer".
void CheckRange(const std::string& what, int64_t value, int64_t first, int64_t end) {
  if (value >= first && value < end) return;
  Refuse(what + " is " + std::to_string(value) + ", must be in [" + std::to_string(first) + ", " +
         std::to_string(end) + ")");
}

std::string Row(const char* array, int64_t row, const char* field) {
  return std::string(array) + "[" + std::to_string(row) + "]: " + field;
}

void CheckCount(const std::string& what, int64_t count) {
  if (count < 0) Refuse(what + " is " + std::to_string(count) + ", must not be negative");
}

// first + count <= end, both not negative.
void CheckRun(const std::string& what, int64_t first, int64_t count, int64_t end) {
  const std::optional<int64_t> last = CheckedSum(first, count);
  if (last && *last <= end) return;
  Refuse(what + " [" + std::to_string(first) + ", +" + std::to_string(count) +
         ") goes beyond the end, " + std::to_string(end));
}

std::shared_ptr<Pool> FindPool(const std::string& what, int id) {
  std::shared_ptr<Pool> pool = Pools().Find(id);
  if (!pool) Refuse(what + " is " + std::to_string(id) + ", no open pool has this number");
  return pool;
}

std::shared_ptr<Pool> OptionalPool(const char* what, int id) {
  return id == -1 ? nullptr : FindPool(what, id);
}

void AddTable(const PlanArrays& arrays, Plan& plan) {
  plan.host_pool = OptionalPool("host_pool", arrays.host_pool);
  plan.row_ptr.assign(arrays.row_ptr.data, arrays.row_ptr.data + arrays.row_ptr.rows);
  plan.table.assign(arrays.table.data, arrays.table.data + arrays.table.rows);
  if (plan.row_ptr.empty()) plan.row_ptr.push_back(0);  // No rows.
  if (plan.row_ptr.front() != 0) Refuse("table_ptr must begin with 0");
  for (size_t row = 1; row < plan.row_ptr.size(); ++row) {
    if (plan.row_ptr[row] < plan.row_ptr[row - 1]) {
      Refuse(Row("table_ptr", static_cast<int64_t>(row), "it falls; it must not"));
    }
  }
  if (plan.row_ptr.back() != arrays.table.rows) {
    Refuse("table_ptr ends with " + std::to_string(plan.row_ptr.back()) + ", but table has " +
           std::to_string(arrays.table.rows) + " slots");
  }
  if (!plan.table.empty() && !plan.host_pool) Refuse("host_pool is -1, but table has slots");
  const int committed = plan.host_pool ? plan.host_pool->committed() : 0;
  for (size_t i = 0; i < plan.table.size(); ++i) {
    CheckRange(Row("table", static_cast<int64_t>(i), "slot"), plan.table[i], 0, committed);
  }
}

void AddJobs(const Table& jobs, Plan& plan) {
  const int64_t num_rows = static_cast<int64_t>(plan.row_ptr.size()) - 1;
  const int64_t num_layers = plan.host_pool ? plan.host_pool->num_layers() : INT32_MAX;
  plan.jobs.reserve(jobs.rows);
  for (int64_t i = 0; i < jobs.rows; ++i) {
    const int32_t* const row = jobs.data + 3 * i;
    CheckRange(Row("jobs", i, "layer"), row[0], 0, num_layers);
    CheckCount(Row("jobs", i, "num_rows"), row[2]);
    CheckRun(Row("jobs", i, "rows"), row[1], row[2], num_rows);
    plan.jobs.push_back({row[0], row[1], row[2]});
  }
}

void AddLoads(const PlanArrays& arrays, Plan& plan) {
  plan.load_pool = OptionalPool("load_pool", arrays.load_pool);
  const int64_t num_layers = plan.load_pool ? plan.load_pool->num_layers() : INT32_MAX;
  const int committed = plan.load_pool ? plan.load_pool->committed() : 0;
  plan.loads.reserve(arrays.loads.rows);
  for (int64_t i = 0; i < arrays.loads.rows; ++i) {
    const int32_t* const row = arrays.loads.data + 3 * i;
    CheckCount(Row("loads", i, "num_slots"), row[2]);
    if (row[2] > 0) {
      if (!plan.load_pool) Refuse(Row("loads", i, "it has slots, but load_pool is -1"));
      CheckRange(Row("loads", i, "layer"), row[0], 0, num_layers);
      CheckRun(Row("loads", i, "slots"), row[1], row[2], committed);
    }
    plan.loads.push_back({row[0], row[1], row[2]});
  }
}

void AddStores(const PlanArrays& arrays, Plan& plan) {
  std::map<int, std::shared_ptr<Pool>> pools;
  int64_t next = 0;
  plan.stores.reserve(arrays.stores.rows);
  for (int64_t i = 0; i < arrays.stores.rows; ++i) {
    const int32_t* const row = arrays.stores.data + 2 * i;
    CheckCount(Row("stores", i, "num_moves"), row[1]);
    CheckRun(Row("stores", i, "moves"), next, row[1], arrays.moves.rows);
    Plan::Store store{row[0], {}};
    store.moves.reserve(row[1]);
    for (const int64_t end = next + row[1]; next < end; ++next) {
      const int32_t* const move = arrays.moves.data + 3 * next;
      std::shared_ptr<Pool>& pool = pools[move[1]];
      if (!pool) pool = FindPool(Row("moves", next, "pool"), move[1]);
      CheckCount(Row("moves", next, "block"), move[0]);
      CheckRange(Row("moves", next, "slot"), move[2], 0, pool->committed());
      CheckRange(Row("stores", i, "layer"), row[0], 0, pool->num_layers());
      store.moves.push_back({move[0], pool, move[2]});
    }
    plan.stores.push_back(std::move(store));
  }
  if (next != arrays.moves.rows) {
    Refuse("the stores have " + std::to_string(next) + " moves, but moves has " +
           std::to_string(arrays.moves.rows) + " rows");
  }
}

}  // namespace

Plan BuildPlan(const PlanArrays& arrays) {
  Plan plan;
  AddTable(arrays, plan);
  AddJobs(arrays.jobs, plan);
  AddLoads(arrays, plan);
  AddStores(arrays, plan);
  return plan;
}

}  // namespace wscope
