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
        key_(int(threadIdx.x) % Shape::kGroupThreads) {}

  // Tiles of a strip.
  __device__ void widen(const StripOfRows& strip, const SeenTiles<Shape>& tiles) {
    Scales next = scales_of(strip, page_of(strip, tiles.begin));
    int page = page_of(strip, tiles.begin + 1);
    tiles.for_each([&](int number) {
      const Scales scales = next;
      next = scales_of(strip, page);  // early, as what comes from far takes a while
      page = page_of(strip, number + 2);
      widen<0>([&](int stage) {
        pipeline_.key_scales[stage][Shape::place_of_scale(key_)] = scales.key;
        pipeline_.value_scales[value_scales_][Shape::place_of_scale(key_)] = scales.value;
      });
      value_scales_ = value_scales_ + 1 == Pipeline::kValueStages ? 0 : value_scales_ + 1;
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

  // The next tile of keys (0) or of values (1); store_scales(stage) is called once there is memory.
  template <int kWhich, class StoreScales>
  __device__ void widen(const StoreScales& store_scales) {
    StageAndPhase<Shape::kStages>& at = at_[kWhich];
    wait_for(&pipeline_.codes.full[kWhich][at.stage], at.phase);
    wait_for(&pipeline_.tiles.empty[kWhich][at.stage], at.phase ^ 1);
    using To = std::conditional_t<kWhich == 0, typename Shape::T, typename Shape::Value>;
    widen_tile<To>(Pipeline::coming(memory_, kWhich, at.stage),
                   Pipeline::tile(memory_, kWhich, at.stage));
    store_scales(at.stage);
    wrote_before_fetch();  // products read by the engine's way, too
    arrive(&pipeline_.tiles.full[kWhich][at.stage]);
    __syncwarp();
    if (key_ % 32 == 0) arrive(&pipeline_.codes.empty[kWhich][at.stage]);
    at.advance();
  }

  // A warp has 16 codes of each of eight rows at a time, four times. Eight lanes that read or write
  // together have those of two rows whose numbers differ by bits 0 and 2: in all banks.
  template <class To>
  __device__ void widen_tile(const char* codes, char* target) const {
    const int lane = key_ % 32, unit = lane % 4;
    const int row_of_eight = lane / 8 ^ (lane / 4 % 2 * 5);
#pragma unroll 2
    for (int i = key_ / 32; i < Shape::kKeys / 8 * Shape::kPanels; i += kGroupWarps) {
      const int row = i / Shape::kPanels * 8 + row_of_eight, panel = i % Shape::kPanels;
      const int place = swizzled<Shape::kWidth>(row, panel * 4 + unit) * 16;
      const uint4 chunk = *reinterpret_cast<const uint4*>(codes + place);
      const uint32_t parts[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t words[4];
        widen_codes<To, typename Shape::Kind>(parts[2 * half], words);
        widen_codes<To, typename Shape::Kind>(parts[2 * half + 1], words + 2);
        *reinterpret_cast<uint4*>(target + Shape::place_of(row, panel * 8 + unit * 2 + half)) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  const PrefillAttention& call_;
  char* const memory_;
  Pipeline& pipeline_;
  const int key_;  // of a tile, whose scales the thread has
  StageAndPhase<Shape::kStages> at_[2];
  int value_scales_ = 0;
};

}  // namespace dsx::cuda
