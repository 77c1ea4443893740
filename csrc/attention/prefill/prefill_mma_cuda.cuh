// prefill_attention on CUDA by tensor cores, for queries of 16 bits over keys and values of the
// same type, or codes, that can be read 16 bytes at a time. A block has some rows of a head of
// keys; the pages that they see come into shared memory one after the other, the next one while
// this one is worked on. Codes are widened there. Two groups of warps take every other page each,
// so that one multiplies while the other weighs; pages are counted from the start of the sequence,
// so a row finds the same however a prompt is cut.
#pragma once

#include "common/cuda/fetch.cuh"
#include "attention/prefill/prefill_codes_cuda.cuh"
#include "attention/prefill/prefill_rows_cuda.cuh"

namespace dsx::cuda {

// The part of each page that a thread fetches: 16 bytes of every few tokens.
template <class Shape>
struct PartOfPages {
  static constexpr int kElement = Shape::kCodes ? 1 : 2;
  static constexpr int kChunks = Shape::kWidth * kElement / 16;
  static constexpr int kTokens = Shape::kThreads / kChunks;  // from one to the next
  int token, chunk, bytes;
  bool is_wide;          // all threads have 16 bytes
  int64_t source, step;  // bytes from the first one of a page, and from one to the next

  __device__ PartOfPages(const PagedKv& kv, int thread)
      : token(thread / kChunks), chunk(thread % kChunks), is_wide(kv.width == Shape::kWidth) {
    const int left = int(kv.width) * kElement - chunk * 16;
    bytes = left < 0 ? 0 : left < 16 ? left : 16;
    source = token * kv.of_token * kElement + (bytes > 0 ? chunk * 16 : 0);
    step = kTokens * kv.of_token * kElement;
  }

  // Begins to fetch it from a page of which so many tokens are there; what is not becomes 0.
  __device__ void fetch(const char* page, int tokens, unsigned near) const {
    const char* from = page + source;
    if (is_wide && tokens >= kPageTokens) {
#pragma unroll
      for (int i = 0; i < kPageTokens / kTokens; ++i, from += step) {
        fetch_part(near + place_of(token + i * kTokens), from);
      }
      return;
    }
#pragma unroll 1
    for (int row = token; row < kPageTokens; row += kTokens, from += step) {
      const int there = row < tokens ? bytes : 0;
      fetch_part(near + place_of(row), there > 0 ? from : page, there);
    }
  }

 private:
  __device__ int place_of(int row) const {
    return Shape::kCodes ? (row * kChunks + chunk) * 16 : Shape::place_of(row, chunk);
  }
};

// Widens the codes of keys, or of values, of a page, and takes their scales along; the threads of a
// group divide the work.
template <class T, class Shape>
__device__ inline void widen_page(const char* codes, char* target, float* scales, int thread) {
  constexpr int kChunks = Shape::kSteps;  // of 16 codes
#pragma unroll
  for (int i = thread; i < kPageTokens * kChunks; i += Shape::kThreads) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(codes + i * 16);
    const uint32_t parts[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
      widen_codes<T, typename Shape::Kind>(parts[2 * half], words);
      widen_codes<T, typename Shape::Kind>(parts[2 * half + 1], words + 2);
      *reinterpret_cast<uint4*>(target + Shape::place_of(i / kChunks, i % kChunks * 2 + half)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  if (thread >= kPageTokens) return;
  scales[thread] = reinterpret_cast<const float*>(codes + Shape::kCodeBytes)[thread];
}

// A barrier of the threads of a group.
template <class Shape>
__device__ inline void group_barrier() {
  if (threadIdx.x < Shape::kThreads) {
    asm volatile("bar.sync 1, %0;" ::"n"(Shape::kThreads) : "memory");
  } else {
    asm volatile("bar.sync 2, %0;" ::"n"(Shape::kThreads) : "memory");
  }
}

// Whether it is so for any thread of a group; all of them call it, and come to a
// barrier before they do again. There is an element of `warps` for each warp of the block, in
// shared memory.
template <class Shape>
__device__ inline bool is_any_of_group(bool is_so, int* warps) {
  const bool is_any = __any_sync(0xffffffff, is_so);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) warps[warp] = is_any;
  group_barrier<Shape>();
  int found = 0;
#pragma unroll
  for (int i = 0; i < Shape::kWarps; ++i) found |= warps[warp / Shape::kWarps * Shape::kWarps + i];
  return found != 0;
}

// The pages that a group of warps goes through: there is memory for the keys of one and the values
// of one, and the next ones are fetched as soon as these are not needed any more.
template <class Shape>
class PagesOfGroup {
 public:
  __device__ PagesOfGroup(const PrefillAttention& call, const StripOfRows& strip, char* memory,
                          int step, int begin, int end)
      : call_(call), strip_(strip), memory_(memory), step_(step), end_(end) {
    look_up(begin);
    fetch<0>();
    fetch<1>();
  }

  // Waits for keys.
  __device__ void begin_keys() {
    wait_for_fetches<1>();
    group_barrier<Shape>();
    if constexpr (Shape::kCodes) widen<0>();
  }

  // Waits for values; nobody needs the keys any more, but their scales.
  __device__ void begin_values() {
    wait_for_fetches<Shape::kCodes ? 1 : 0>();
    group_barrier<Shape>();
    if constexpr (Shape::kCodes) {
      widen<1>();
    } else {
      fetch<0>();
    }
  }

  // Masks values of the page that are not finite: after two barriers, with `between` in between,
  // these are 0.
  template <class Between>
  __device__ void mask_non_finite(int* warps, const Between& between) {
    if (!is_any_of_group<Shape>(mask_mine<false>(), warps)) return;
    between();
    group_barrier<Shape>();
    mask_mine<true>();
    group_barrier<Shape>();
  }

  // Nobody needs the values any more.
  __device__ void end_values() {
    if constexpr (Shape::kCodes) return;
    group_barrier<Shape>();
    fetch<1>();
  }

  // Of keys (0) or values (1), as they are multiplied.
  __device__ char* tile(int which) const { return memory_ + which * Shape::kTileBytes; }
  __device__ float* scales(int which) const {
    constexpr int kBegin = 2 * (Shape::kTileBytes + Shape::kComingBytes);
    return reinterpret_cast<float*>(memory_ + kBegin + which * Shape::kScaleBytes);
  }

 private:
  // Which page is the next one: by the time that it is fetched, it is known.
  __device__ void look_up(int number) {
    next_ = number;
    if (number < end_) page_ = int(call_.kv.page_of(strip_.slot, number));
  }

  __device__ char* coming(int which) const {
    return Shape::kCodes ? tile(2) + which * Shape::kComingBytes : tile(which);
  }

  // Begins to fetch keys, and then values, of the next page, if there is one, and ends a group of
  // copies.
  template <int kWhich>
  __device__ void fetch() {
    if (next_ < end_) {
      const PagedKv& kv = call_.kv;
      const void* const stored = kWhich == 0 ? kv.keys : kv.values;
      const int64_t place = kv.place(page_, strip_.head, 0) * (Shape::kCodes ? 1 : 2);
      const int tokens = strip_.length - next_ * kPageTokens;
      const int thread = thread_here() % Shape::kThreads;
      const unsigned near = unsigned(__cvta_generic_to_shared(coming(kWhich)));
      const PartOfPages<Shape> part(kv, thread);
      part.fetch(static_cast<const char*>(stored) + place, tokens, near);
      if constexpr (Shape::kCodes) {
        const float* const scales = kWhich == 0 ? kv.key_scales : kv.value_scales;
        const float* const source = scales + kv.scale_place(page_, strip_.head, thread);
        float* const scale = reinterpret_cast<float*>(coming(kWhich) + Shape::kCodeBytes) + thread;
        if (thread < ::min(tokens, kPageTokens)) fetch_bytes<4>(scale, source);
        if (thread >= tokens && thread < kPageTokens) *scale = 0;
      }
      if (kWhich == 1) look_up(next_ + step_);
    }
    end_fetches();
  }

  // Whether some of this thread's part of the values are not finite.
  template <bool kMasks>
  __device__ bool mask_mine() const {
    const auto words = reinterpret_cast<uint32_t*>(tile(1));
    uint32_t found = 0;
#pragma unroll 4
    for (int i = thread_here() % Shape::kThreads; i < Shape::kTileBytes / 4; i += Shape::kThreads) {
      const uint32_t word = words[i], marks = non_finite_halves<typename Shape::Value>(word);
      if (kMasks) words[i] = word & ~marks;
      found |= marks;
    }
    return found != 0;
  }

  template <int kWhich>
  __device__ void widen() {
    using To = std::conditional_t<kWhich == 0, typename Shape::T, typename Shape::Value>;
    const int thread = thread_here() % Shape::kThreads;
    widen_page<To, Shape>(coming(kWhich), tile(kWhich), scales(kWhich), thread);
    group_barrier<Shape>();
    fetch<kWhich>();
  }

  const PrefillAttention& call_;
  const StripOfRows& strip_;
  char* memory_;
  int step_, end_, next_, page_ = 0;
};

template <class Shape>
__device__ inline void read_queries(const PrefillAttention& call, const StripOfRows& strip,
                                    char* target) {
  using T = typename Shape::T;
  constexpr int kChunks = Shape::kSteps * 2;
#pragma unroll 4
  for (int i = threadIdx.x; i < Shape::kRows * kChunks; i += blockDim.x) {
    const int chunk = i % kChunks;
    const int row = strip.first_row + i / kChunks;
    Elements<T, 8> elements = {};
    if (row < strip.rows()) {
      const T* source =
          call.q.at<T>(strip.batch, strip.token_of(row), strip.head_of(row)).address + chunk * 8;
      const int left = int(call.kv.width) - chunk * 8;
      if (left >= 8 && is_aligned<8>(source, 2)) {
        elements = load_elements<Access::vector, 8>(source, 8);
      } else {
        elements = load_elements<Access::single, 8>(source, left);
      }
    }
    *reinterpret_cast<Elements<T, 8>*>(target + Shape::place_of(i / kChunks, chunk)) = elements;
  }
}

// Lets a warp take in a page, together with its group.
template <bool kAll, class Shape>
__device__ inline void take_page(PagesOfGroup<Shape>& pages, WarpRows<Shape>& warp, int number,
                                 bool is_edge, int* warps) {
  const auto address = [](const char* of) { return unsigned(__cvta_generic_to_shared(of)); };
  const int first = number * kPageTokens;
  pages.begin_keys();
  warp.template take_keys<kAll>(first, address(pages.tile(0)));
  pages.begin_values();
  warp.template take_scores<kAll>(first, is_edge, pages.scales(0));
  if (!kAll && is_edge) {  // what is not finite must not reach rows that do not see it
    pages.mask_non_finite(warps, [&] { warp.add_non_finite(first, pages.tile(1)); });
  }
  warp.template take_values<kAll>(first, is_edge, address(pages.tile(1)), pages.scales(1));
  pages.end_values();
}

// With one group of threads or two.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads* Shape::kGroups, 1)
    prefill_mma_kernel(const __grid_constant__ PrefillAttention call) {
  extern __shared__ __align__(1024) char shared_bytes[];
  __shared__ RowScoring scoring[Shape::kRows];
  __shared__ int found[Shape::kWarps * Shape::kGroups];
  const StripOfRows strip(call, blockIdx.x, Shape::kRows);
  const bool wrong = strip.wrong || lacks_pages(call, strip);
  const int rows = ::min(strip.rows() - strip.first_row, Shape::kRows);
  if (wrong || rows < Shape::kRows) store_the_rest(call, strip, Shape::kRows, wrong);
  if (wrong || rows <= 0) return;
  const int groups = blockDim.x / Shape::kThreads, group = threadIdx.x / Shape::kThreads;
  const int first = strip.position_of(strip.first_row);
  const int last = strip.position_of(strip.first_row + rows - 1);
  const int end = last / kPageTokens + 1;
  int number = int(seen_at(first, call.window).begin) / kPageTokens;
  if (groups > 1 && number % 2 != group) ++number;
  char* const memory = shared_bytes + Shape::kQueryBytes + group * Shape::kGroupBytes;
  PagesOfGroup<Shape> pages(call, strip, memory, groups, number, end);
  read_queries<Shape>(call, strip, shared_bytes);
  WarpRows<Shape> warp(call, strip, unsigned(__cvta_generic_to_shared(shared_bytes)), scoring);
  __syncthreads();
  warp.keep_queries();
  // Pages of which all rows see all.
  const int all_from = ceil_div(seen_at(last, call.window).begin, kPageTokens);
  const int all_end = (first + 1) / kPageTokens;
  for (; number < end; number += groups) {
    // Most pages go through a loop with no other code in it: instructions are read from memory,
    // too.
    for (; warp.is_plain() && number >= all_from && number < all_end; number += groups) {
      take_page<true>(pages, warp, number, false, nullptr);
    }
    const bool is_edge = number < all_from || number >= all_end;
    if (number < end) take_page<false>(pages, warp, number, is_edge, found);
  }
  if (groups > 1) warp.merge(shared_bytes);
  if (group == 0) warp.store(strip);
}

}  // namespace dsx::cuda
