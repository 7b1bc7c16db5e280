#include "pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "size_math.h"
#include "workers.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older headers lack the name.
#endif

namespace wscope {
namespace {

constexpr int64_t kSmallPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;
// One worker's share of a commit job. Small, so that attention waits little for a growing pool:
// jobs are first in first out, and fresh pages come at 0.2 to 4 GB/s.
constexpr int64_t kTouchBytes = int64_t{4} << 20;

std::string Mib(int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

// Bytes that the machine could hand out without swapping; -1 if the kernel does not say.
int64_t AvailableBytes() {
  // No C++ streams: their locale facets clash with a second copy of the runtime library that
  // another module of the process may have brought along.
  const std::unique_ptr<FILE, int (*)(FILE*)> meminfo(std::fopen("/proc/meminfo", "re"),
                                                      &std::fclose);
  char line[128];
  while (meminfo != nullptr && std::fgets(line, sizeof(line), meminfo.get()) != nullptr) {
    long long kib = 0;
    if (std::sscanf(line, "MemAvailable: %lld", &kib) == 1) return int64_t{kib} * 1024;
  }
  return -1;
}

// Gives the range its pages. Returns false if there are none left.
bool Touch(uint8_t* begin, int64_t bytes) {
  if (madvise(begin, bytes, MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;
  // An old kernel. The first write to a page gives it memory; fresh pages are zero already.
  for (int64_t at = 0; at < bytes; at += kSmallPage) {
    volatile uint8_t* byte = begin + at;
    *byte = 0;
  }
  return true;
}

int64_t Positive(int64_t value, const char* name) {
  if (value <= 0) {
    throw std::invalid_argument("Pool: " + std::string(name) + " is " + std::to_string(value) +
                                ", must be at least 1");
  }
  return value;
}

}  // namespace

Pool::Pool(int num_layers, int max_slots, int64_t block_bytes, std::shared_ptr<PageLock> page_lock)
    : page_lock_(std::move(page_lock)),
      num_layers_(Positive(num_layers, "num_layers")),
      max_slots_(Positive(max_slots, "max_slots")),
      block_bytes_(Positive(block_bytes, "block_bytes")) {
  const std::optional<int64_t> used = CheckedProduct({max_slots, block_bytes});
  page_bytes_ = used && *used >= kHugePage ? kHugePage : kSmallPage;
  const std::optional<int64_t> layer = used ? CheckedRoundUp(*used, page_bytes_) : std::nullopt;
  const std::optional<int64_t> all = layer ? CheckedProduct({num_layers, *layer}) : std::nullopt;
  const std::optional<int64_t> padded = all ? CheckedSum(*all, kHugePage) : std::nullopt;
  if (!padded) {
    throw std::invalid_argument("Pool: " + std::to_string(num_layers) + " layers x " +
                                std::to_string(max_slots) + " slots x " +
                                std::to_string(block_bytes) + " bytes overflow 64 bits");
  }
  layer_bytes_ = *layer;
  mapping_bytes_ = static_cast<size_t>(*padded);
  // No access until a commit: a stray read faults, and a system that counts every writable page
  // against its memory (overcommit off) counts only what is committed.
  mapping_ =
      mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    throw OutOfMemory("Pool: cannot reserve " + Mib(*padded) + " of address space (" +
                      std::strerror(errno) + "); raise `ulimit -v` or use fewer slots");
  }
  const auto address = reinterpret_cast<uintptr_t>(mapping_);
  base_ = static_cast<uint8_t*>(mapping_) + (kHugePage - address % kHugePage) % kHugePage;
  // A reader of 4 KiB pages gets half the bandwidth. Refused where huge pages are off: that works.
  madvise(base_, static_cast<size_t>(*all), MADV_HUGEPAGE);
}

Pool::~Pool() {
  int64_t begin = 0;
  for (const int64_t end : pinned_ends_) {
    for (int layer = 0; layer < num_layers_; ++layer) {
      page_lock_->Unlock(base_ + layer * layer_bytes_ + begin);
    }
    begin = end;
  }
  munmap(mapping_, mapping_bytes_);
}

int64_t Pool::PinnedRun(int64_t offset, int64_t bytes) const {
  const std::lock_guard<std::mutex> lock(pinned_mutex_);
  const auto end = std::upper_bound(pinned_ends_.begin(), pinned_ends_.end(), offset);
  return end == pinned_ends_.end() ? bytes : std::min(bytes, *end - offset);
}

void Pool::Commit(int num_slots) {
  if (!creator_.IsThisProcess()) throw std::runtime_error(Creator::ForkText("Pool"));
  if (num_slots < 0 || num_slots > max_slots_) {
    throw std::invalid_argument("Pool.commit: num_slots is " + std::to_string(num_slots) +
                                ", must be in [0, " + std::to_string(max_slots_) + "]");
  }
  const std::lock_guard<std::mutex> lock(commit_mutex_);
  if (num_slots <= committed()) return;
  // Both ends are at most layer_bytes_, so rounding cannot overflow.
  const int64_t from = *CheckedRoundUp(committed() * block_bytes_, page_bytes_);
  const int64_t to = *CheckedRoundUp(num_slots * block_bytes_, page_bytes_);
  if (to > from) {
    CommitLayers(from, to);
    if (page_lock_) PinLayers(from, to);
  }
  committed_.store(num_slots, std::memory_order_release);
}

void Pool::CommitLayers(int64_t from, int64_t to) {
  const int64_t needed = (to - from) * num_layers_;
  const int64_t available = AvailableBytes();
  if (available >= 0 && needed > available) {
    throw OutOfMemory("Pool.commit: needs " + Mib(needed) + ", the machine has " + Mib(available) +
                      " left; lower the host memory budget");
  }
  struct Piece {
    uint8_t* begin;
    int64_t bytes;
  };
  std::vector<Piece> pieces;
  for (int layer = 0; layer < num_layers_; ++layer) {
    uint8_t* const begin = base_ + layer * layer_bytes_ + from;
    if (mprotect(begin, to - from, PROT_READ | PROT_WRITE) != 0) {
      throw OutOfMemory("Pool.commit: the system refuses " + Mib(needed) + " (" +
                        std::strerror(errno) + "); lower the host memory budget");
    }
    for (int64_t at = 0; at < to - from; at += kTouchBytes) {
      pieces.push_back({begin + at, std::min(kTouchBytes, to - from - at)});
    }
  }
  std::atomic<bool> failed{false};
  const auto touch = [&](size_t piece) {
    if (!Touch(pieces[piece].begin, pieces[piece].bytes)) failed = true;
  };
  const size_t at_once = std::max(1, Workers::Get().num_workers());
  for (size_t first = 0; first < pieces.size() && !failed; first += at_once) {
    const size_t count = std::min(at_once, pieces.size() - first);
    const auto task = std::make_shared<Task>(static_cast<int>(count),
                                             [&, first](int part) { touch(first + part); });
    if (Workers::Get().Submit(task)) {
      task->Wait();
    } else {
      for (size_t i = 0; i < count; ++i) touch(first + i);
    }
  }
  if (failed) {
    throw OutOfMemory("Pool.commit: the system has no pages left for " + Mib(needed) +
                      "; lower the host memory budget");
  }
}

void Pool::PinLayers(int64_t from, int64_t to) {
  for (int layer = 0; layer < num_layers_; ++layer) {
    const std::string refusal = page_lock_->Lock(base_ + layer * layer_bytes_ + from, to - from);
    if (refusal.empty()) continue;
    while (--layer >= 0) page_lock_->Unlock(base_ + layer * layer_bytes_ + from);
    for (int each = 0; each < num_layers_; ++each) {  // Nobody will use these pages.
      madvise(base_ + each * layer_bytes_ + from, to - from, MADV_DONTNEED);
    }
    throw OutOfMemory("Pool.commit: the system does not pin " + Mib((to - from) * num_layers_) +
                      " more for the GPU (" + refusal +
                      "); raise the limit on locked memory (`ulimit -l`)");
  }
  const std::lock_guard<std::mutex> lock(pinned_mutex_);
  pinned_ends_.push_back(to);
}

Registry<Pool>& Pools() {
  static auto* const pools = new Registry<Pool>;  // Never destroyed: programs may run until exit.
  return *pools;
}

}  // namespace wscope
