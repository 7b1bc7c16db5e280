// The calls of a program on a GPU: what they put on XLA's stream and on the lane's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "carrier.h"
#include "cuda_driver.h"
#include "cuda_lane.h"

namespace wscope {

// The calls of a program that XLA runs on `stream`.
class OnStream : public Carrier {
 public:
  OnStream(std::shared_ptr<CudaLane> lane, cuda::Stream stream)
      : lane_(std::move(lane)), stream_(stream) {}

  Status Start(const void* q, Storage q_storage, int job_delay_ms, OpenJob* open) override;
  Status Finish(OpenJob open, float* o, float* lse, TimingSource* timing) override;
  // Brings `now` if nobody has yet, and sends `next` on its way while XLA works on `now`.
  Status Load(const LoadCall& call, TimingSource* timing) override;
  Status Store(const uint8_t* blocks, const std::vector<Plan::Move>& moves, Mover& mover,
               StagedStore* staged) override;

 private:
  Status StartJob(const void* q, Storage q_storage, int job_delay_ms,
                  const std::shared_ptr<CudaJob>& held);
  Status Fill(const LoadCall& call, const Plan::Load& load, size_t number);

  const std::shared_ptr<CudaLane> lane_;
  const cuda::Stream stream_;
};

}  // namespace wscope
