#include "fake_cuda_memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace fake_cuda {
namespace {

constexpr uintptr_t kPage = 4096;

struct Table {
  // Readers do not wait for each other, so that no copy is put in order with another by it.
  std::shared_mutex mutex;
  std::map<uintptr_t, std::shared_ptr<Range>> ranges;  // By their begin.
  std::atomic<int> live[3] = {};
};

Table& TheTable() {
  static auto* const table = new Table;  // Never destroyed: streams use it.
  return *table;
}

void Add(Kind kind, uintptr_t begin, size_t bytes) {
  Table& table = TheTable();
  const auto range = std::make_shared<Range>();
  range->kind = kind;
  range->begin = begin;
  range->bytes = bytes;
  table.ranges.emplace(begin, range);
  ++table.live[static_cast<int>(kind)];
}

}  // namespace

Use Find(uintptr_t begin, size_t bytes, bool device) {
  Table& table = TheTable();
  const std::shared_lock<std::shared_mutex> lock(table.mutex);
  auto at = table.ranges.upper_bound(begin);
  if (at == table.ranges.begin()) return nullptr;
  const std::shared_ptr<Range> range = (--at)->second;
  if ((range->kind == Kind::kDevice) != device) return nullptr;
  if (begin + bytes > range->begin + range->bytes) return nullptr;
  range->users.fetch_add(1, std::memory_order_relaxed);
  return Use(range.get(),
             [range](Range*) { range->users.fetch_sub(1, std::memory_order_relaxed); });
}

void* Allocate(Kind kind, size_t bytes) {
  void* const data = std::malloc(bytes);
  if (data == nullptr) return nullptr;
  std::memset(data, 0xff, bytes);
  Table& table = TheTable();
  const std::unique_lock<std::shared_mutex> lock(table.mutex);
  Add(kind, reinterpret_cast<uintptr_t>(data), bytes);
  return data;
}

bool Free(Kind kind, uintptr_t begin) {
  Table& table = TheTable();
  const std::unique_lock<std::shared_mutex> lock(table.mutex);
  const auto at = table.ranges.find(begin);
  if (at == table.ranges.end() || at->second->kind != kind) return false;
  if (at->second->users.load(std::memory_order_relaxed) > 0) {
    std::fprintf(stderr, "fake_cuda: memory of kind %d goes while a stream may use it\n",
                 static_cast<int>(kind));
    std::abort();
  }
  table.ranges.erase(at);
  --table.live[static_cast<int>(kind)];
  if (kind != Kind::kRegistered) std::free(reinterpret_cast<void*>(begin));
  return true;
}

int Register(void* begin, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  if (bytes == 0 || first % kPage != 0 || bytes % kPage != 0) return 1;
  const volatile char* const pages = static_cast<const char*>(begin);
  for (size_t at = 0; at < bytes; at += kPage)
    static_cast<void>(pages[at]);  // Faults if not there.
  Table& table = TheTable();
  const std::unique_lock<std::shared_mutex> lock(table.mutex);
  const auto after = table.ranges.lower_bound(first);
  if (after != table.ranges.end() && after->first < first + bytes) return 712;
  if (after != table.ranges.begin()) {
    const Range& before = *std::prev(after)->second;
    if (before.begin + before.bytes > first) return 712;
  }
  Add(Kind::kRegistered, first, bytes);
  return 0;
}

int Live(Kind kind) { return TheTable().live[static_cast<int>(kind)]; }

}  // namespace fake_cuda
