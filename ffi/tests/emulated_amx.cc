// The AMX kernel on emulated tiles, as kEmulatedAmxKernel.
#define WSCOPE_EMULATE_TILES
#include "../attention_amx.cc"
