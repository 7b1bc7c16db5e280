#include "job_memory.h"

#include <algorithm>
#include <new>
#include <utility>

namespace wscope {
namespace {

constexpr int64_t kLine = 64;
constexpr size_t kMostSpare = 4;  // Jobs that run at the same time, usually.

// Not cleared: every byte is written before it is read.
SpareBuffers::Buffer NewBuffer(int64_t bytes) {
  return {std::unique_ptr<uint8_t[]>(new (std::nothrow) uint8_t[bytes]), bytes};
}

}  // namespace

uint8_t* ThreadMemory(int64_t bytes) {
  thread_local SpareBuffers::Buffer own;
  if (own.bytes < bytes + kLine || own.memory == nullptr) own = NewBuffer(bytes + kLine);
  if (own.memory == nullptr) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(own.memory.get());
  return own.memory.get() + (kLine - address % kLine) % kLine;
}

SpareBuffers& SpareBuffers::Get() {
  static auto* const spares = new SpareBuffers;  // Never destroyed: workers run until exit.
  return *spares;
}

SpareBuffers::Buffer SpareBuffers::Take(int64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(spare_.rbegin(), spare_.rend(),
                                    [&](const Buffer& buffer) { return buffer.bytes >= bytes; });
    if (found != spare_.rend()) {
      Buffer buffer = std::move(*found);
      spare_.erase(std::next(found).base());
      return buffer;
    }
  }
  return NewBuffer(bytes);
}

void SpareBuffers::Give(Buffer buffer) {
  if (buffer.memory == nullptr) return;
  Buffer oldest;  // Freed without the lock.
  const std::lock_guard<std::mutex> lock(mutex_);
  spare_.push_back(std::move(buffer));
  if (spare_.size() <= kMostSpare) return;
  oldest = std::move(spare_.front());
  spare_.erase(spare_.begin());
}

}  // namespace wscope
