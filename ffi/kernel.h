// What a kernel of one instruction set sees: plain data, so that no inline function compiled with
// its flags can become the copy that the linker keeps for everybody.
#pragma once

#include <cstdint>

namespace wscope {

// One kv head of a layer and the query heads that read it.
struct HeadShape {
  int group;          // Query heads, R.
  int key_dim;        // K
  int value_dim;      // V
  int block;          // D, a multiple of kEntryTile.
  bool value_in_key;  // The value is the first V numbers of the key.
  bool bfloat16;      // Storage of the entries; else float32.
  float scale;        // Of the scores.
};

// The byte order of a block, "tiles" (layout.py packs it; tests/tiles.h indexes it). A row is 64
// bytes: P numbers for each of 16 lanes, P = 2 in bfloat16 and 1 in float32.
//   keys    [D / 16][K / P rows][16 entries][P dims], a last odd dim as [16 entries]
//   values  [panels of 64 dims][D / 32][tiles of 16 dims][32 / P rows][16 dims][P entries]
//   latent  (value_in_key) as values, in one panel of K dims
// A panel or tile at the end is as narrow as what is left: nothing is padded.
constexpr int kLanes = 16;
constexpr int kEntryTile = 32;        // Entries of a value tile.
constexpr int kPanelDims = 64;        // Dims of a value panel.
constexpr int64_t kOwnPrefetch = -1;  // As far ahead as the kernel finds best.

// The blocks to attend to. Kernels read the head of block i at blocks[i] + head_offset.
struct HeadBlocks {
  const uint8_t* const* blocks;
  int num_blocks;
  int64_t head_offset;
  // Null for all, else a bit per entry, [num_blocks, D / 32]: entries that count. What the others
  // hold must be finite.
  const uint32_t* selected;
  // How far ahead of the loads the kernel prefetches, kOwnPrefetch or in bytes: 0 for no line
  // before it is loaded, at most a head. Where it prefetches several pages side by side, at least
  // these should be ahead.
  int64_t prefetch_bytes;
  // The head that is attended to next, or null: prefetched with the end of the last block.
  const uint8_t* after = nullptr;
  bool follows = false;  // The call before had blocks[0] as what comes after.
};

// The running state of a softmax over some entries, per query head of one kv head; scores are in
// units of log2: score * scale * log2(e). With no entry yet: max = -inf, sum = 0, o = 0.
struct SoftmaxState {
  float* o;    // [R, V], sum over entries of 2^(score - max) * value
  float* max;  // [R]
  float* sum;  // [R], sum over entries of 2^(score - max)
};

// Kernels check nothing and never throw.
struct Kernel {
  const char* name;
  bool exact;  // Weights and products in float32; else weights and queries are rounded to bfloat16.
  // Chosen for a shape if it takes less than this share of the time of the kernel chosen so far.
  // Above 1 for tiles: one thread is timed, and where all cores are at work vectors fall behind
  // (docs/kernel.md).
  double worth;
  // Not considered for fewer query heads a kv head: there float32 keeps up with memory, the times
  // of the two are alike, and noise would choose, so that results would differ between starts.
  int least_group;
  // The kernel that takes what this one does not support; null if it supports every shape.
  const Kernel* general;
  bool (*supports)(const HeadShape& shape);
  int64_t (*scratch_bytes)(const HeadShape& shape);
  // Adds the entries to `state`. `scratch` is 64-byte aligned.
  void (*attend)(const HeadShape& shape, const float* q /* [R, K] */, const HeadBlocks& blocks,
                 void* scratch, const SoftmaxState& state);
  // Reads whole lines of 256 bytes and does nothing with them: the ceiling of `attend`.
  void (*read)(const uint8_t* from, int64_t bytes, int64_t prefetch_bytes);
};

extern const Kernel kPortableKernel;
#if defined(__x86_64__)
extern const Kernel kAvx2Kernel;
extern const Kernel kAvx512Kernel;
extern const Kernel kAvx512Bf16Kernel;
extern const Kernel kAmxKernel;
#endif

}  // namespace wscope
