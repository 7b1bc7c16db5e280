// Objects that a compiled program names by a small number.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace wscope {

// Hands out the lowest free number, so that a second engine, or a second run, has the numbers of
// the first and finds the same compiled program. Thread-safe.
template <typename T>
class Registry {
 public:
  int Add(std::shared_ptr<T> item) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int id = 0;
    for (auto it = items_.begin(); it != items_.end() && it->first == id; ++it) ++id;
    items_.emplace(id, std::move(item));
    return id;
  }

  // The number is free afterwards; whoever holds the object keeps it alive.
  void Remove(int id) {
    std::shared_ptr<T> removed;  // Dies after the lock: its destructor may be slow.
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = items_.find(id);
    if (it == items_.end()) return;
    removed = std::move(it->second);
    items_.erase(it);
  }

  // Gives the object up and keeps the number taken.
  void Retire(int id) {
    std::shared_ptr<T> removed;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto it = items_.find(id); it != items_.end()) removed = std::move(it->second);
  }

  // Null if no object has this number.
  std::shared_ptr<T> Find(int id) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = items_.find(id);
    return it == items_.end() ? nullptr : it->second;
  }

  // A copy: objects may come and go while the caller walks it.
  std::map<int, std::shared_ptr<T>> Snapshot() const {
    std::map<int, std::shared_ptr<T>> items;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, item] : items_) {
      if (item) items.emplace(id, item);
    }
    return items;
  }

 private:
  mutable std::mutex mutex_;
  std::map<int, std::shared_ptr<T>> items_;  // Null: retired.
};

}  // namespace wscope
