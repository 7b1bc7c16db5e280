// How kernels of vectors and tiles walk through blocks. Included inside the anonymous namespace of
// a file of one instruction set, which has defined what vec_avx512.h defines, and kPrefetchPages.
#pragma once

constexpr int64_t kPage = 4096;  // What a hardware prefetcher stays within.

// Into the cache of that level and those behind it.
template <int kLevel>
inline void Prefetch(const uint8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), kLevel == 1 ? _MM_HINT_T0 : _MM_HINT_T1);
}

// Runs through the head's bytes ahead of the loads, and on into the next block. Where the
// instruction set has kPrefetchPages of more than one, the first lines of so many pages come first,
// then the second ones: each page's own hardware prefetcher so runs ahead of the lines that are
// asked for, and theirs take no fill buffer of the first-level cache, which tile loads want too.
template <int kLevel>
struct CursorInto {
  const uint8_t* at;    // The next line, of the first page of a span.
  const uint8_t* turn;  // Where that page ends.
  const uint8_t* end;   // Of the head.
  const uint8_t* next;  // Where the next block's head begins.
  int64_t bytes;        // Of a head.
  int64_t page;         // Bytes; a line where a head has less than a span of pages.
  int owed;             // Lines, less than one of each page.

  inline int64_t Span() const { return kPrefetchPages * page; }

  inline void Lines(int count) {
    if constexpr (kPrefetchPages == 1) {
      for (int i = 0; i < count; ++i) Prefetch<kLevel>(at + 64 * i);
      at += 64 * count;
      if (at >= end) Begin(next, at - end);
    } else {
      for (owed += count; owed >= kPrefetchPages; owed -= kPrefetchPages) {
        if (page == kPage) {
          for (int i = 0; i < kPrefetchPages; ++i) Prefetch<kLevel>(at + i * kPage);
        } else {
          for (int i = 0; i < kPrefetchPages; ++i) Prefetch<kLevel>(at + i * 64);
        }
        at += 64;
        if (at == turn) Turn();
      }
    }
  }

  // To the next span, or the next block.
  inline void Turn() {
    at += Span() - page;
    if (at < end) {
      Enter(at);
    } else {
      Begin(next, 0);
    }
  }

  // To what comes `ahead` bytes after the beginning of a head.
  inline void Begin(const uint8_t* head, int64_t ahead) {
    end = head + bytes;
    Enter(head + ahead / Span() * Span());
    at += ahead % Span() / kPrefetchPages / 64 * 64;
  }

  // To the first line of a span. The last one of a head may repeat some of the one before.
  inline void Enter(const uint8_t* first) {
    at = end - first < Span() ? end - Span() : first;
    turn = at + page;
  }
};

using Cursor = CursorInto<1>;

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kNoScore = -__builtin_inff();

inline int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline int64_t ItemBytes(const HeadShape& shape) { return shape.bfloat16 ? 2 : 4; }

inline int64_t HeadBytes(const HeadShape& shape) {
  const int64_t dims = shape.key_dim + (shape.value_in_key ? 0 : shape.value_dim);
  return shape.block * dims * ItemBytes(shape);
}

// `own_ahead`: how many bytes ahead this kernel prefetches unless it is told. What no call before
// has prefetched of the first block is prefetched at once.
template <int kLevel = 1>
inline CursorInto<kLevel> MakeCursor(const HeadShape& shape, const HeadBlocks& blocks, int i,
                                     int64_t own_ahead) {
  const int64_t head_bytes = HeadBytes(shape);
  const int64_t told = blocks.prefetch_bytes;
  const int64_t ahead = told == kOwnPrefetch ? own_ahead : told;
  const uint8_t* const begin = blocks.blocks[i] + blocks.head_offset;
  const uint8_t* const after = blocks.after ? blocks.after : begin;
  const uint8_t* const next =
      i + 1 < blocks.num_blocks ? blocks.blocks[i + 1] + blocks.head_offset : after;
  // Where nothing is to come ahead, no page may.
  const bool pages = ahead > 0 && head_bytes >= kPrefetchPages * kPage;
  CursorInto<kLevel> cursor{nullptr, nullptr, nullptr, next, head_bytes, pages ? kPage : 64, 0};
  if (i == 0 && !blocks.follows) {
    cursor.Begin(begin, 0);
    cursor.Lines(static_cast<int>(ahead / 64));
  } else if (ahead < head_bytes) {
    cursor.Begin(begin, ahead);
  } else {
    cursor.Begin(next, ahead - head_bytes);
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
