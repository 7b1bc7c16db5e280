// How kernels of vectors and tiles walk through blocks. Included inside the anonymous namespace of
// a file of one instruction set, which has defined what vec_avx512.h defines, and kPrefetchAhead.
#pragma once

// Runs through the head's bytes in their order, ahead of the loads, and on into the next block.
struct Cursor {
  const uint8_t* at;
  const uint8_t* end;
  const uint8_t* next;  // Where the next block's head begins.

  inline void Lines(int count) {
    for (int i = 0; i < count; ++i) Prefetch(at + 64 * i);
    at += 64 * count;
  }
  // To be called now and then: follows into the next block.
  inline void Wrap() {
    if (at < end) return;
    at = next + (at - end);
    end = next + (int64_t{1} << 40);
  }
};

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kNoScore = -__builtin_inff();

inline int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline int64_t ItemBytes(const HeadShape& shape) { return shape.bfloat16 ? 2 : 4; }

inline int64_t HeadBytes(const HeadShape& shape) {
  const int64_t dims = shape.key_dim + (shape.value_in_key ? 0 : shape.value_dim);
  return shape.block * dims * ItemBytes(shape);
}

// `own_ahead`: how many bytes ahead this kernel prefetches unless it is told.
inline Cursor MakeCursor(const HeadShape& shape, const HeadBlocks& blocks, int i,
                         int64_t own_ahead) {
  const int64_t head_bytes = HeadBytes(shape);
  const int64_t ahead = blocks.prefetch_bytes == kOwnPrefetch ? own_ahead : blocks.prefetch_bytes;
  const uint8_t* const begin = blocks.blocks[i] + blocks.head_offset;
  const uint8_t* const next =
      i + 1 < blocks.num_blocks ? blocks.blocks[i + 1] + blocks.head_offset : begin;
  Cursor cursor{begin + ahead, begin + head_bytes, next};
  cursor.Wrap();
  return cursor;
}

inline bool AnySelected(const HeadShape& shape, const uint32_t* selected) {
  if (!selected) return true;
  uint32_t any = 0;
  for (int i = 0; i < shape.block / 32; ++i) any |= selected[i];
  return any != 0;
}

template <int kCount>
struct Heads {
  static constexpr int kValue = kCount;
};

// Calls fn(Heads<n>, first) for runs of n heads that make up `group`, n a power of two up to kMost.
template <int kMost, typename Fn>
inline void ForHeads(int group, Fn fn) {
  int h = 0;
  for (; h + kMost <= group; h += kMost) fn(Heads<kMost>{}, h);
  if constexpr (kMost > 1) {
    ForHeads<kMost / 2>(group - h, [&](auto heads, int first) { fn(heads, h + first); });
  }
}

inline void Read(const uint8_t* from, int64_t bytes, int64_t prefetch_bytes) {
  const int64_t ahead = prefetch_bytes == kOwnPrefetch ? 2048 : prefetch_bytes;
  Vec a = Zero(), b = Zero();
  const auto floats = [](const uint8_t* at) { return Load(reinterpret_cast<const float*>(at)); };
  for (int64_t i = 0; i < bytes; i += 256, from += 256) {
    for (int line = 0; line < 256; line += 64) Prefetch(from + ahead + line);
    a = Max(Max(a, floats(from)), floats(from + 64));
    b = Max(Max(b, floats(from + 128)), floats(from + 192));
  }
  // Or the compiler may see that nobody needs it.
  const float sum = ReduceMax(Max(a, b));
  asm volatile("" ::"m"(sum));
}
