// The custom call that packs entries into blocks.
#pragma once

namespace wscope {

// An XLA_FFI_Handler: (key [N, G, K], value [N, G, V]?) -> blocks [N / D, G, D * (K + V)].
void* PackHandler();

}  // namespace wscope
