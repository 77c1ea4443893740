// The group of warps of prefill_attention that makes numbers of 16 bits of the codes of a tile, and
// brings their scales.
#pragma once

#include "attention/prefill/prefill_codes_cuda.cuh"
#include "attention/prefill/prefill_warpgroups_fetch_cuda.cuh"

namespace dsx::cuda {

template <class Shape>
class CodeWidener {
  using Pipeline = WarpgroupPipeline<Shape>;
  static_assert(Shape::kKeys == Shape::kGroupThreads, "a thread has the scales of a key");

 public:
  __device__ CodeWidener(const PrefillAttention& call, char* memory, Pipeline& pipeline)
      : call_(call),
        memory_(memory),
        pipeline_(pipeline),
        key_(int(threadIdx.x) % Shape::kGroupThreads) {
    find_places();
  }

  // Tiles of a strip.
  __device__ void widen(const StripOfRows& strip, const SeenTiles<Shape>& tiles) {
    Scales scales = scales_of(strip, page_of(strip, tiles.begin));
    int page = page_of(strip, tiles.begin + 1);
    tiles.for_each([&](int number) {
      widen<0>([&](int stage) {
        store(scales, stage);
        scales = scales_of(strip, page);  // early, as what comes from far takes a while
        page = page_of(strip, number + 2);
      });
    }, [&](int) { widen<1>([](int) {}); });
  }

 private:
  struct Scales {
    float key, value;
  };

  __device__ int page_of(const StripOfRows& strip, int tile) const {
    return page_of_strip(call_, strip, tile * Shape::kPages + key_ / kPageTokens);
  }
  __device__ Scales scales_of(const StripOfRows& strip, int page) const {
    if (page < 0) return {0, 0};
    const int64_t place = call_.kv.scale_place(page, strip.head, key_ % kPageTokens);
    return {call_.kv.key_scales[place], call_.kv.value_scales[place]};
  }
  // Those of values, too: there is memory for them once they have been read.
  __device__ void store(const Scales& scales, int stage) {
    const int place = Shape::place_of_scale(key_), of_values = value_scales_.stage;
    pipeline_.key_scales[stage][place] = scales.key;
    wait_for(&pipeline_.value_scales_read[of_values], value_scales_.phase ^ 1);
    pipeline_.value_scales[of_values][place] = scales.value;
    value_scales_.advance();
  }

  // The next tile of keys (0) or of values (1); store_scales(stage) is called once there is memory.
  template <int kWhich, class StoreScales>
  __device__ void widen(const StoreScales& store_scales) {
    StageAndPhase<Shape::kStages>& at = at_[kWhich];
    wait_for(&pipeline_.codes.full[kWhich][at.stage], at.phase);
    const char* const codes = Pipeline::coming(memory_, kWhich, at.stage) + codes_;
    Chunks chunks;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) chunks.load(i, codes);
    wait_for(&pipeline_.tiles.empty[kWhich][at.stage], at.phase ^ 1);
    using To = std::conditional_t<kWhich == 0, typename Shape::T, typename Shape::Value>;
    store_scales(at.stage);
    widen_tile<To>(chunks, codes, Pipeline::tile(memory_, kWhich, at.stage));
    wrote_before_fetch();  // products read by the engine's way, too
    __syncwarp();
    if (key_ % 32 == 0) {
      arrive(&pipeline_.tiles.full[kWhich][at.stage]);
      arrive(&pipeline_.codes.empty[kWhich][at.stage]);
    }
    at.advance();
  }

  // A warp has 16 codes of each of eight rows at a time. Eight lanes that read or write together
  // have those of two rows whose numbers differ by bits 0 and 2: in all banks. A lane's next codes
  // are those of its column so many rows further down, a multiple of eight: each time as many bytes
  // further on, which instructions add by themselves.
  static constexpr int kRowsFurther = 8 * kGroupWarps / Shape::kPanels;
  static constexpr int kChunks = Shape::kKeys / kRowsFurther;
  // Loads under way, as a load takes longer than to widen what it brings.
  static constexpr int kAhead = 3;
  static_assert(kChunks >= kAhead && kGroupWarps % Shape::kPanels == 0);

  struct Chunks {
    uint4 words[kAhead];

    __device__ void load(int i, const char* codes) {
      codes += i * kRowsFurther * Shape::kWidth;
      words[i % kAhead] = *reinterpret_cast<const uint4*>(codes);
    }
  };

  __device__ void find_places() {
    const int warp = key_ / 32, lane = key_ % 32, unit = lane % 4, panel = warp % Shape::kPanels;
    const int row = warp / Shape::kPanels * 8 + (lane / 8 ^ (lane / 4 % 2 * 5));
    codes_ = swizzled<Shape::kWidth>(row, panel * 4 + unit) * 16;
    numbers_ = Shape::place_of(row, panel * kUnitsOfLine + unit * 2);
  }

  template <class To>
  __device__ void widen_tile(Chunks& chunks, const char* codes, char* target) const {
    char* const halves[2] = {target + numbers_, target + (numbers_ ^ kUnitBytes)};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 chunk = chunks.words[i % kAhead];
      if (i + kAhead < kChunks) chunks.load(i + kAhead, codes);
      const uint32_t parts[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t words[4];
        widen_codes<To, typename Shape::Kind>(parts[2 * half], words);
        widen_codes<To, typename Shape::Kind>(parts[2 * half + 1], words + 2);
        *reinterpret_cast<uint4*>(halves[half] + i * kRowsFurther * kLineBytes) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  const PrefillAttention& call_;
  char* const memory_;
  Pipeline& pipeline_;
  const int key_;        // of a tile, whose scales the thread has
  int codes_, numbers_;  // where its first codes are in a tile, and their numbers
  StageAndPhase<Shape::kStages> at_[2];
  StageAndPhase<Pipeline::kValueStages> value_scales_;
};

}  // namespace dsx::cuda
