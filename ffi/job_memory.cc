#include "job_memory.h"

#include <algorithm>
#include <new>
#include <utility>

namespace wscope {
namespace {

constexpr int64_t kLine = 64;

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

// With mutex_ held: the smallest that is large enough, or null.
SpareBuffers::Buffer* SpareBuffers::Find(int64_t bytes) {
  Buffer* best = nullptr;
  for (Buffer& buffer : spare_) {
    if (buffer.memory == nullptr || buffer.bytes < bytes) continue;
    if (best == nullptr || buffer.bytes < best->bytes) best = &buffer;
  }
  return best;
}

void SpareBuffers::Reserve(int64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Find(bytes) != nullptr) return;
  }
  Buffer fresh = NewBuffer(bytes);
  if (fresh.memory == nullptr) throw std::bad_alloc();
  Give(std::move(fresh));
}

SpareBuffers::Buffer SpareBuffers::Take(int64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Buffer* const found = Find(bytes)) return std::exchange(*found, Buffer{});
  }
  return NewBuffer(bytes);
}

void SpareBuffers::Give(Buffer buffer) {
  if (buffer.memory == nullptr) return;
  // What is left over dies with the parameter, without the lock.
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Buffer& spare : spare_) {
    if (spare.memory == nullptr || spare.bytes < buffer.bytes) std::swap(spare, buffer);
  }
}

}  // namespace wscope
