// What memory the fake driver knows.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace fake_cuda {

enum class Kind { kDevice, kPinned, kRegistered };

struct Range {
  Kind kind;
  uintptr_t begin;
  size_t bytes;
  // Operations under way. Relaxed: no order between threads that the driver does not promise.
  std::atomic<int> users{0};
};

// A range that an operation uses until this is gone.
using Use = std::shared_ptr<Range>;

// The one range that has all of the bytes, if it is the device's or not, as asked; else null.
Use Find(uintptr_t begin, size_t bytes, bool device);
// Memory full of 0xFF.
void* Allocate(Kind kind, size_t bytes);
// False if it is no memory of this kind. Ends the process if an operation uses it.
bool Free(Kind kind, uintptr_t begin);
// The driver's error: 0, 1 for pages that are not whole or not there, 712 for known ones.
int Register(void* begin, size_t bytes);
int Live(Kind kind);

}  // namespace fake_cuda
