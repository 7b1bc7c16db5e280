// How the result of a host job comes to the device.
#pragma once

#include <cstdint>
#include <string>

#include "cuda_driver.h"
#include "status.h"

namespace wscope {

// A kernel reads it out of pinned memory. A copy would wait behind the chunk that is on its way to
// the PING-PONG slots: the device has one engine for that direction, and a chunk takes it longer
// than all the rest of a layer's hand-over. Where the kernel cannot be loaded it is a copy.
class ResultCarrier {
 public:
  // In the context that is current.
  ResultCarrier();
  ~ResultCarrier();
  ResultCarrier(const ResultCarrier&) = delete;
  ResultCarrier& operator=(const ResultCarrier&) = delete;

  // What brings results, and why nothing better, in words.
  const std::string& name() const { return name_; }

  // `from`: o and lse, one behind the other, in memory that the driver has pinned.
  Status Carry(const float* from, int64_t o_size, int64_t lse_size, float* o, float* lse,
               cuda::Stream stream) const;

 private:
  std::string name_ = "a kernel";
  cuda::Module module_ = nullptr;
  cuda::Function kernel_ = nullptr;
  cuda::Context context_ = nullptr;
};

}  // namespace wscope
