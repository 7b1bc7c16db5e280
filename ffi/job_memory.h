// Memory that jobs need for a moment, again and again. To map fresh pages and to give them back
// costs more than many a job.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace wscope {

// This thread's own, from a 64-byte line on, until its next call. Null if the system has none left.
uint8_t* ThreadMemory(int64_t bytes);

// Buffers that jobs take, leave their states in, and give back.
class SpareBuffers {
 public:
  struct Buffer {
    std::unique_ptr<uint8_t[]> memory;  // Null if the system has none left.
    int64_t bytes = 0;
  };

  static SpareBuffers& Get();

  // At least so many bytes, which may hold anything.
  Buffer Take(int64_t bytes);
  // The last ones given back are kept, and taken first.
  void Give(Buffer buffer);

 private:
  std::mutex mutex_;
  std::vector<Buffer> spare_;  // In the order in which they came back.
};

}  // namespace wscope
