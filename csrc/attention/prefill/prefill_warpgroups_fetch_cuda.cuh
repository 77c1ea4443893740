// The group of warps of prefill_attention that fetches: one thread has the copy engine bring tiles
// of keys and values, the other warps bring queries.
#pragma once

#include "common/cuda/fetch.cuh"
#include "attention/prefill/prefill_warpgroups_tiles_cuda.cuh"

namespace dsx::cuda {

struct PrefillMaps {
  CUtensorMap keys, values;
};

// A page that rows of a strip may see; -1 if there is none, or nothing in it.
__device__ inline int page_of_strip(const PrefillAttention& call, const StripOfRows& strip,
                                    int number) {
  return number * kPageTokens < strip.length ? int(call.kv.page_of(strip.slot, number)) : -1;
}

// The thread that fetches tiles.
template <class Shape>
class TileFetcher {
  using Pipeline = WarpgroupPipeline<Shape>;

 public:
  __device__ TileFetcher(const PrefillAttention& call, const PrefillMaps& maps, char* memory,
                         Pipeline& pipeline)
      : call_(call), maps_(maps), memory_(memory), pipeline_(pipeline) {
    ask_for_map(maps.keys);
    ask_for_map(maps.values);
  }

  // Those of a strip.
  __device__ void fetch(const StripOfRows& strip, const SeenTiles<Shape>& tiles) {
    PagesOfTile next = look_up(strip, tiles.begin), pages = next, before = next;
    tiles.for_each([&](int number) {
      before = pages, pages = next;
      next = look_up(strip, number + 1);  // early, as it takes a while
      fetch<0>(maps_.keys, strip.head, pages);
    }, [&](int) {
      fetch<1>(maps_.values, strip.head, before);
      before = pages;
    });
  }

 private:
  struct PagesOfTile {
    int number[Shape::kPages];
  };

  // What there is none of, or nothing in, is outside of the cache: it becomes 0.
  __device__ PagesOfTile look_up(const StripOfRows& strip, int tile) const {
    PagesOfTile pages;
#pragma unroll
    for (int i = 0; i < Shape::kPages; ++i) {
      pages.number[i] = page_of_strip(call_, strip, tile * Shape::kPages + i);
    }
    return pages;
  }

  template <int kWhich>
  __device__ void fetch(const CUtensorMap& map, int head, const PagesOfTile& pages) {
    StageAndPhase<Shape::kStages>& at = at_[kWhich];
    Barrier* const full = &pipeline_.coming().full[kWhich][at.stage];
    wait_for(&pipeline_.coming().empty[kWhich][at.stage], at.phase ^ 1);
    arrive_expecting(full, kPanels * Shape::kPages * kPagePanelBytes);
    char* const tile = Pipeline::coming(memory_, kWhich, at.stage);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int i = 0; i < Shape::kPages; ++i) {
        char* const near = tile + (panel * Shape::kPages + i) * kPagePanelBytes;
        const TileOrigin origin{panel * Shape::kPanelElements, 0, head, pages.number[i]};
        fetch_page_tile(near, map, origin, full);
      }
    }
    at.advance();
  }

  // Codes come as one panel.
  static constexpr int kPanels = Shape::kCodes ? 1 : Shape::kPanels;
  static constexpr int kPagePanelBytes =
      Shape::kCodes ? kPageTokens * Shape::kWidth : Shape::kPagePanelBytes;

  const PrefillAttention& call_;
  const PrefillMaps& maps_;
  char* const memory_;
  Pipeline& pipeline_;
  StageAndPhase<Shape::kStages> at_[2];
};

// The warps that fetch queries.
template <class Shape>
class QueryFetcher {
  using Pipeline = WarpgroupPipeline<Shape>;
  using T = typename Shape::T;
  static constexpr int kThreads = Pipeline::kQueryWarps * 32;

 public:
  __device__ QueryFetcher(const PrefillAttention& call, char* memory, Pipeline& pipeline,
                          int thread)
      : call_(call), memory_(memory), pipeline_(pipeline), thread_(thread) {}

  // Those of a strip, and whether its slot has all pages that a new token of it looks at.
  __device__ void fetch(const StripOfRows& strip) {
    const bool lacks = __any_sync(0xffffffff, lacks_some_page(strip));
    wait_for(&pipeline_.queries_empty, phase_ ^ 1);
    if (thread_ % 32 == 0) pipeline_.lacks_pages[thread_ / 32] = lacks;
    const unsigned near = shared_address(memory_);
    constexpr int kChunks = Shape::kWidth / 8;
#pragma unroll 1
    for (int i = thread_; i < Shape::kRows * kChunks; i += kThreads) {
      fetch(strip, i / kChunks, i % kChunks, near);
    }
    end_fetches();
    wait_for_fetches<0>();
    wrote_before_fetch();
    arrive(&pipeline_.queries_full);
    phase_ ^= 1;
  }

 private:
  // Eight elements of a row; those that are not there become 0.
  __device__ void fetch(const StripOfRows& strip, int row, int chunk, unsigned near) const {
    const int group = row / Shape::kGroupRows, panel = chunk / kUnitsOfLine;
    near += group * Shape::kGroupQueryBytes + panel * Shape::kQueryPanelBytes +
            place_in_tma_tile(row % Shape::kGroupRows, chunk % kUnitsOfLine);
    row += strip.first_row;
    const int left = int(call_.kv.width) - chunk * 8;
    const bool is_there = row < strip.rows() && left > 0;
    row = is_there ? row : strip.first_row;
    const T* const source =
        call_.q.at<T>(strip.batch, strip.token_of(row), strip.head_of(row)).address +
        (is_there ? chunk * 8 : 0);
    if (!is_there || (left >= 8 && is_aligned<8>(source, 2))) {
      const void* const from = is_there ? static_cast<const void*>(source) : call_.kv.keys;
      fetch_part(near, from, is_there ? 16 : 0);
      return;
    }
    const auto elements = load_elements<Access::single, 8>(source, left);
    const uint4& words = reinterpret_cast<const uint4&>(elements);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(near), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
  }

  __device__ bool lacks_some_page(const StripOfRows& strip) const {
    const int begin = int(seen_at(strip.position_of(0), call_.window).begin) / kPageTokens;
    const int end = ceil_div(strip.length, kPageTokens);
    bool lacks = false;
    for (int i = begin + thread_; i < end; i += kThreads) {
      lacks |= call_.kv.page_of(strip.slot, i) < 0;
    }
    return lacks;
  }

  const PrefillAttention& call_;
  char* const memory_;
  Pipeline& pipeline_;
  const int thread_;
  int phase_ = 0;
};

}  // namespace dsx::cuda
