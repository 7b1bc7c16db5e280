// A machine without a driver: told, and refused with the reason.
#include <cstdio>
#include <stdexcept>

#include "check.h"
#include "cuda_driver.h"

int main() {
  using wscope::Throws;
  if (wscope::cuda::GetDriver() != nullptr) {
    std::puts("there is a driver");
    return 77;
  }
  const std::string& why = wscope::cuda::WhyNoDriver();
  CHECK(!why.empty());
  CHECK(Throws<std::runtime_error>([] { wscope::cuda::MakePageLock(0); }, "CUDA: " + why));
  CHECK(Throws<std::runtime_error>([] { wscope::cuda::TimeLoad(0, 4096); }, "CUDA: " + why));
}
