// The custom calls that compiled programs make.
#pragma once

namespace wscope {

struct Target {
  const char* name;
  void* handler;  // An XLA_FFI_Handler.
};

// The targets of the platforms "cpu" and "CUDA"; both end with a null name. The second are there in
// every build, and to be offered only where there is a driver.
const Target* CpuTargets();
const Target* CudaTargets();

}  // namespace wscope
