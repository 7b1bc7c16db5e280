// How kernels of vectors and tiles walk through blocks. Included inside the anonymous namespace of
// a file of one instruction set, which has defined what vec_avx512.h defines, and kPrefetchPages.
#pragma once

constexpr int64_t kPage = 4096;  // What a hardware prefetcher stays within.

// Into the cache of that level and those behind it.
template <int kLevel>
inline void Prefetch(const uint8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), kLevel == 1 ? _MM_HINT_T0 : _MM_HINT_T1);
}

// Runs through the head's bytes ahead of the loads, and on into the next block. With vectors
// (kPrefetchPages of 1) in the order of memory. With tiles the first lines of so many pages come
// first, then the second ones, and what is left at the end in as many shorter pages: each page's
// own hardware prefetcher so runs ahead of the lines that are asked for, into the second level, and
// what it brings takes no fill buffer of the first level, which tile loads want too.
template <int kLevel>
struct PrefetchCursor {
  const uint8_t* at;    // The next line, of the first page of a span.
  const uint8_t* turn;  // Where that page ends.
  const uint8_t* end;   // Of the head.
  const uint8_t* next;  // Where the next block's head begins.
  int64_t bytes;        // Of a head.
  int64_t most;         // Bytes of a page at most.
  int64_t page;         // Bytes of a page of this span.
  int64_t owed;         // Lines, less than one of each page.

  inline void Lines(int64_t count) {
    if constexpr (kPrefetchPages == 1) {
      for (int64_t i = 0; i < count; ++i) Prefetch<kLevel>(at + 64 * i);
      at += 64 * count;
      if (at >= end) Begin(next, at - end);
    } else {
      for (owed += count; owed >= kPrefetchPages; owed -= kPrefetchPages) {
        if (page == kPage) {  // Nearly always: distances that are known need no arithmetic.
          for (int i = 0; i < kPrefetchPages; ++i) Prefetch<kLevel>(at + i * kPage);
        } else {
          for (int i = 0; i < kPrefetchPages; ++i) Prefetch<kLevel>(at + i * page);
        }
        at += 64;
        if (at == turn) Turn();
      }
    }
  }

  // To what comes `ahead` bytes after the beginning of a head, at most its length.
  inline void Begin(const uint8_t* head, int64_t ahead) {
    end = head + bytes;
    if constexpr (kPrefetchPages == 1) {
      at = head + ahead;
    } else {
      const int64_t span = kPrefetchPages * most;
      Enter(head + ahead / span * span);
      at += ahead % span / kPrefetchPages / 64 * 64;
      if (at >= turn) at = turn - 64;
    }
  }

  inline void Enter(const uint8_t* span) {
    const int64_t even = (end - span) / kPrefetchPages / 64 * 64;
    page = even < 64 ? 64 : (even < most ? even : most);
    at = span;
    turn = span + page;
  }

  inline void Turn() {
    const uint8_t* const span = turn + (kPrefetchPages - 1) * page;
    if (span < end) {
      Enter(span);
    } else {
      Begin(next, 0);
    }
  }
};

using Cursor = PrefetchCursor<1>;

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kNoScore = -__builtin_inff();

inline int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline int64_t ItemBytes(const HeadShape& shape) { return shape.bfloat16 ? 2 : 4; }

inline int64_t HeadBytes(const HeadShape& shape) {
  const int64_t dims = shape.key_dim + (shape.value_in_key ? 0 : shape.value_dim);
  return shape.block * dims * ItemBytes(shape);
}

// `own_ahead`: how many bytes ahead this kernel prefetches unless it is told; at most a head. With
// tiles, what no call before has prefetched of the first block is prefetched at once.
template <int kLevel = 1>
inline PrefetchCursor<kLevel> MakeCursor(const HeadShape& shape, const HeadBlocks& blocks, int i,
                                         int64_t own_ahead) {
  const int64_t bytes = HeadBytes(shape);
  const int64_t told = blocks.prefetch_bytes == kOwnPrefetch ? own_ahead : blocks.prefetch_bytes;
  const int64_t ahead = told < bytes ? told : bytes;
  const uint8_t* const begin = blocks.blocks[i] + blocks.head_offset;
  const uint8_t* const after = blocks.after ? blocks.after : begin;
  const uint8_t* const next =
      i + 1 < blocks.num_blocks ? blocks.blocks[i + 1] + blocks.head_offset : after;
  // Pages would fetch ahead although nothing is to come ahead.
  const int64_t most = ahead > 0 ? kPage : 64;
  PrefetchCursor<kLevel> cursor{nullptr, nullptr, nullptr, next, bytes, most, most, 0};
  if (kPrefetchPages > 1 && i == 0 && !blocks.follows) {
    cursor.Begin(begin, 0);
    cursor.Lines(ahead / 64);
  } else if (ahead < bytes) {
    cursor.Begin(begin, ahead);
  } else {
    cursor.Begin(next, 0);
  }
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
    for (int line = 0; line < 256; line += 64) Prefetch<1>(from + ahead + line);
    a = Max(Max(a, floats(from)), floats(from + 64));
    b = Max(Max(b, floats(from + 128)), floats(from + 192));
  }
  // Or the compiler may see that nobody needs it.
  const float sum = ReduceMax(Max(a, b));
  asm volatile("" ::"m"(sum));
}
