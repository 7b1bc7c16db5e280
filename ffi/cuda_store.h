// Blocks that XLA's stream has copied to device memory of ours, on their way to host memory.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "cuda_driver.h"
#include "cuda_lane.h"
#include "mover.h"
#include "status.h"

namespace wscope {

class DeviceStore : public DeviceStaging {
 public:
  // The blocks are in `buffer` after `copied`.
  DeviceStore(std::shared_ptr<CudaLane> lane, std::shared_ptr<cuda::DeviceBuffer> buffer,
              cuda::Event copied)
      : lane_(std::move(lane)), buffer_(std::move(buffer)), copied_(std::move(copied)) {}
  ~DeviceStore() override {
    if (buffer_) lane_->GiveDevice(std::move(buffer_), std::move(copied_));
  }

  Status MoveHome(const StagedStore& store) override;

 private:
  // As many blocks as the bounce buffer takes; those of a pinned pool need none.
  Status MoveSome(const StagedStore& store, size_t* first);
  Status CopyOut(const StagedStore::Destination& to, uint8_t* target, size_t block, int64_t bytes);
  Status MakeBounce(int64_t block_bytes);

  const std::shared_ptr<CudaLane> lane_;
  std::shared_ptr<cuda::DeviceBuffer> buffer_;
  cuda::Event copied_;
};

}  // namespace wscope
