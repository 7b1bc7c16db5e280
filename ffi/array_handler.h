// Attention of the CPU over ordinary arrays.
#pragma once

namespace wscope {

void* HostAttentionHandler();  // An XLA_FFI_Handler, for the platform "cpu".

}  // namespace wscope
