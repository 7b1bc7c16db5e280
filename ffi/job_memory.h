// Memory that jobs need for a moment, again and again. To map fresh pages and to give them back
// costs more than many a job.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>

namespace wscope {

// So many bytes and the rest of their last 64-byte line.
inline int64_t WholeLines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// This thread's own, from a 64-byte line on, until its next call. Null if the system has none left.
uint8_t* ThreadMemory(int64_t bytes);

// How many jobs a schedule may interleave: as many buffers are kept.
constexpr int kMostSpare = 2;

// Buffers that jobs take, leave their states in, and give back.
class SpareBuffers {
 public:
  struct Buffer {
    std::unique_ptr<uint8_t[]> memory;  // Null if the system has none left.
    int64_t bytes = 0;
  };

  static SpareBuffers& Get();

  // Sees to it that there is one of that size, so that Take finds it. Throws std::bad_alloc.
  void Reserve(int64_t bytes);
  // At least so many bytes, which may hold anything: of those that are spare the smallest.
  Buffer Take(int64_t bytes);
  // The larger ones are kept.
  void Give(Buffer buffer);

 private:
  Buffer* Find(int64_t bytes);

  std::mutex mutex_;
  std::array<Buffer, kMostSpare> spare_;  // Null where there is none.
};

}  // namespace wscope
