// Numbers: the lowest free one first, and never the wrong object.
#include "registry.h"

#include <memory>
#include <thread>
#include <vector>

#include "check.h"

namespace wscope {
namespace {

void TestLowestFree() {
  Registry<int> registry;
  for (int i = 0; i < 4; ++i) CHECK(registry.Add(std::make_shared<int>(10 + i)) == i);
  registry.Remove(2);
  registry.Remove(0);
  registry.Remove(0);
  CHECK(!registry.Find(0) && *registry.Find(1) == 11 && !registry.Find(-1) && !registry.Find(9));
  CHECK(registry.Add(std::make_shared<int>(20)) == 0);
  CHECK(registry.Add(std::make_shared<int>(22)) == 2);
  CHECK(registry.Add(std::make_shared<int>(24)) == 4);
  CHECK(registry.Snapshot().size() == 5);
}

void TestHolderKeepsAlive() {
  Registry<int> registry;
  const int id = registry.Add(std::make_shared<int>(7));
  const std::shared_ptr<int> held = registry.Find(id);
  registry.Remove(id);
  CHECK(*held == 7 && held.use_count() == 1);
}

void TestRetired() {
  Registry<int> registry;
  const auto item = std::make_shared<int>(7);
  CHECK(registry.Add(item) == 0 && registry.Add(std::make_shared<int>(8)) == 1);
  registry.Retire(0);
  registry.Retire(5);
  CHECK(item.use_count() == 1 && !registry.Find(0) && registry.Snapshot().size() == 1);
  CHECK(registry.Add(std::make_shared<int>(9)) == 2);
}

void TestThreads() {
  Registry<int> registry;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&registry, thread] {
      for (int i = 0; i < 500; ++i) {
        const int id = registry.Add(std::make_shared<int>(thread));
        CHECK(id < 4 && *registry.Find(id) == thread);
        registry.Remove(id);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(registry.Snapshot().empty());
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::TestLowestFree();
  wscope::TestHolderKeepsAlive();
  wscope::TestRetired();
  wscope::TestThreads();
}
