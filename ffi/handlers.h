// The custom calls that compiled programs make.
#pragma once

namespace wscope {

struct Target {
  const char* name;
  void* handler;  // An XLA_FFI_Handler.
};

// The targets of the platform "cpu"; ends with a null name.
const Target* CpuTargets();

}  // namespace wscope
