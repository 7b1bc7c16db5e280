// Memory of a host region: [layer][slot][block].
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "registry.h"
#include "thread.h"

namespace wscope {

// The machine cannot give the memory asked for; the text says how much and what to do.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// Pins memory for a device, so that it is copied at the full speed of the link.
class PageLock {
 public:
  virtual ~PageLock() = default;
  // Whole pages. Empty, or why the system refuses.
  virtual std::string Lock(void* begin, size_t bytes) = 0;
  virtual void Unlock(void* begin) = 0;
};

// Reserves address space for all slots at once and makes slots usable ("commits" them) in steps.
// Committed memory is zero, in huge pages where the system gives them, and never moves.
class Pool {
 public:
  // With `page_lock` all that is committed is pinned. Throws std::invalid_argument for a size that
  // is not positive or overflows, OutOfMemory when the system refuses the address space.
  Pool(int num_layers, int max_slots, int64_t block_bytes,
       std::shared_ptr<PageLock> page_lock = nullptr);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Makes slots [0, num_slots) of every layer usable; the workers touch their pages. Never shrinks.
  // Work of other callers goes on in between. Throws std::invalid_argument for a number out of
  // range, OutOfMemory when the machine has too little or does not pin it, std::runtime_error in a
  // forked child.
  void Commit(int num_slots);

  int num_layers() const { return num_layers_; }
  int max_slots() const { return max_slots_; }
  int64_t block_bytes() const { return block_bytes_; }
  int committed() const { return committed_.load(std::memory_order_acquire); }
  int64_t committed_bytes() const { return committed() * block_bytes_; }  // Of each layer.

  // Consecutive slots of a layer are contiguous. The slot must be committed.
  uint8_t* Block(int layer, int slot) const {
    return base_ + layer * layer_bytes_ + slot * block_bytes_;
  }

  bool is_pinned() const { return page_lock_ != nullptr; }
  // How many of `bytes` from `offset` of a layer on were pinned in one piece: no copy to a device
  // may reach beyond it.
  int64_t PinnedRun(int64_t offset, int64_t bytes) const;

 private:
  void CommitLayers(int64_t from, int64_t to);
  void PinLayers(int64_t from, int64_t to);

  const Creator creator_;
  const std::shared_ptr<PageLock> page_lock_;
  const int num_layers_;
  const int max_slots_;
  const int64_t block_bytes_;
  int64_t page_bytes_ = 0;   // What layers and commits are rounded to.
  int64_t layer_bytes_ = 0;  // From one layer to the next.
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  uint8_t* base_ = nullptr;  // 2 MiB aligned, inside the mapping.
  std::mutex commit_mutex_;
  std::atomic<int> committed_{0};
  mutable std::mutex pinned_mutex_;
  std::vector<int64_t> pinned_ends_;  // Where the pieces of a layer end, ascending.
};

// The pools that plans can name.
Registry<Pool>& Pools();

}  // namespace wscope
