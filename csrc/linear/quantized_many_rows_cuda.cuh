// The kernel of quantized_many_rows: codes become floats, as unpack_weight makes them, in the
// registers from which warpgroups multiply them, while those before are multiplied.
//
// A block has kBlockRows rows of the weight and kColumns rows of x. Two blocks of a cluster have
// the same rows of x: each brings half of them near, for both. Or, where there would be few blocks,
// the blocks of a cluster have a part of the length each, and add up what they find. One warp
// brings lines of codes, beside their scales, and lines of x near, each in stages of their own;
// each of two warpgroups has half of the rows of the weight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/cuda/chain.cuh"
#include "common/cuda/device.cuh"
#include "common/cuda/floats.cuh"
#include "common/cuda/mma.cuh"
#include "common/cuda/warpgroup_mma.cuh"
#include "linear/quantized_many_rows.h"
#include "linear/quantized_products_cuda.cuh"

namespace dsx::cuda {

// A call with what is worked out of it before the launch.
struct ManyRows : QuantizedManyRows {
  Scales scales;
};

namespace many_rows {

constexpr int kGroups = 2, kBlockRows = kGroups * kGroupWarps * kTileRows;
constexpr int kThreads = (kGroups + 1) * kGroupWarps * kWarp;
constexpr int kMultiplyingRegisters = 232, kCopyingRegisters = 40;
constexpr int kWeightStages = 3, kMostXStages = 8;
constexpr int kPitch = kBlockRows + 4;  // of the sums, floats: so that lanes are in different banks

struct Maps {
  CUtensorMap weight, x, scales, offsets;
};

// Which block does what, and where things are in shared memory.
struct Places {
  int splits;        // of the length: as many blocks of a cluster
  int sharing;       // or so many share rows of x; one of both is 1
  int lines;         // of codes, of all of them
  int column_tiles;  // of x
  int x_stages;
  int scale_bytes, weight_stage_bytes;

  DSX_HOST_DEVICE int cluster() const { return splits * sharing; }
};

template <int kColumns>
constexpr int kXStageBytes = kColumns * kLineBytes;

}  // namespace many_rows

// A pair of codes that pair_of has made numbers as floats, scaled and rounded. Asymmetric codes
// have no sign: their numbers are kZero more.
template <class T, bool kAsymmetric, int kZero>
__device__ inline uint32_t scaled_pair(uint32_t pair, float scale, float offset) {
  float low, high;
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000);
  } else {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair));
    low = both.x, high = both.y;
  }
  low = kAsymmetric ? __fmaf_rn(low + kZero, scale, offset) : __fmul_rn(low, scale);
  high = kAsymmetric ? __fmaf_rn(high + kZero, scale, offset) : __fmul_rn(high, scale);
  uint32_t result;
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
}

// Arrives at where block number `rank` of the cluster has what this one has there.
__device__ inline void arrive_in_cluster(Barrier* barrier, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
      " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }" ::"r"(
          shared_address(barrier)),
      "r"(rank)
      : "memory");
#endif
}

// As fetch_tma_tiles, to the same place in both blocks of a cluster, at whose barriers it counts.
__device__ inline void fetch_tma_tiles_for_both(void* near, const CUtensorMap& map, int row,
                                                int column, Barrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(near)),
      "l"(&map), "r"(0), "r"(row), "r"(column), "r"(shared_address(barrier)), "h"(uint16_t(3))
      : "memory");
#endif
}

// What the copying warp does: its first thread alone.
template <int kBits, int kColumns>
__device__ inline void copy_many_rows(const many_rows::Maps& maps, const many_rows::Places& places,
                                      const Scales& scales, int rank, int row, int column,
                                      int first, int count, char* weights, char* xs,
                                      Barrier* weight_here, Barrier* weight_read, Barrier* x_here,
                                      Barrier* x_read) {
  using namespace many_rows;
  constexpr int kXLines = 16 / kBits;
  const uint64_t policy = read_once();
  int weight_stage = 0, weight_phase = 1, x_stage = 0, x_phase = 1;
  const int tiles = scales.offsets == nullptr ? 1 : 2;
  for (int line = first; line < first + count; ++line) {
    wait_for(weight_read + weight_stage, weight_phase);
    Barrier* const here = weight_here + weight_stage;
    char* const near = weights + weight_stage * places.weight_stage_bytes;
    arrive_expecting(here, kBlockRows * kLineBytes + tiles * places.scale_bytes);
    fetch_tma_tiles(near, maps.weight, row, line, here);
    const int group = scales.group_of(line);
    fetch_tile(near + kBlockRows * kLineBytes, maps.scales, row, group, here, policy);
    if (tiles == 2) {
      fetch_tile(near + kBlockRows * kLineBytes + places.scale_bytes, maps.offsets, row, group,
                 here, policy);
    }
    if (++weight_stage == kWeightStages) weight_stage = 0, weight_phase ^= 1;
    for (int i = 0; i < kXLines; ++i) {
      wait_for(x_read + x_stage, x_phase);
      arrive_expecting(x_here + x_stage, kXStageBytes<kColumns>);
      char* const x = xs + x_stage * kXStageBytes<kColumns>;
      if (places.sharing == 1) {
        fetch_tma_tiles(x, maps.x, column, line * kXLines + i, x_here + x_stage);
      } else {
        fetch_tma_tiles_for_both(x + rank * kXStageBytes<kColumns> / 2, maps.x,
                                 column + rank * kColumns / 2, line * kXLines + i,
                                 x_here + x_stage);
      }
      if (++x_stage == places.x_stages) x_stage = 0, x_phase ^= 1;
    }
  }
}

template <class T, int kBits, int kColumns, bool kAsymmetric>
__global__ void __launch_bounds__(many_rows::kThreads, 1)
    many_rows_kernel(const __grid_constant__ ManyRows call,
                     const __grid_constant__ many_rows::Places places,
                     const __grid_constant__ many_rows::Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using namespace many_rows;
  constexpr int kSums = kColumns / 2, kXLines = 16 / kBits, kBlocks = 4;  // of 16 products, a line
  extern __shared__ __align__(16) char shared[];
  __shared__ Barrier weight_here[kWeightStages], weight_read[kWeightStages];
  __shared__ Barrier x_here[kMostXStages], x_read[kMostXStages];
  char* const xs = reinterpret_cast<char*>(
      ceil_div(reinterpret_cast<uintptr_t>(shared), uintptr_t(kTmaTileAlignment)) *
      kTmaTileAlignment);
  char* const weights = xs + places.x_stages * kXStageBytes<kColumns>;
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const int rank = places.cluster() > 1 ? int(rank_in_cluster()) : 0;
  const int split = places.splits > 1 ? rank : 0, member = rank - split;
  const int tile = int(blockIdx.x) / places.cluster();
  const int row = (tile / places.column_tiles * places.sharing + member) * kBlockRows;
  const int column = tile % places.column_tiles * kColumns;
  const int each = int(ceil_div(places.lines, places.splits)), first = split * each;
  const int count = ::max(0, ::min(each, places.lines - first));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kWeightStages; ++i) {
      begin_barrier(weight_here + i, 1);
      begin_barrier(weight_read + i, kGroups * kGroupWarps);
    }
    for (int i = 0; i < places.x_stages; ++i) {
      begin_barrier(x_here + i, 1);
      begin_barrier(x_read + i, places.sharing * kGroups * kGroupWarps);
    }
    show_barriers();
  }
  cluster_barrier(places.sharing);
  if (warp >= kGroups * kGroupWarps) {
    give_registers<kCopyingRegisters>();
    if (warp == kGroups * kGroupWarps && lane == 0) {
      copy_many_rows<kBits, kColumns>(maps, places, call.scales, member, row, column, first, count,
                                      weights, xs, weight_here, weight_read, x_here, x_read);
    }
    __syncwarp();
    cluster_barrier_after_reading(places.cluster());
    cluster_barrier(places.cluster());
    cluster_barrier_after_reading(places.cluster());
    return;
  }
  take_registers<kMultiplyingRegisters>();
  float sums[kSums];
#pragma unroll
  for (int j = 0; j < kColumns / kColumnTile; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[4 * j + i] = 0;
  }
  const int first_row = warp * kTileRows;  // of the block's
  const unsigned codes_place =
      unsigned(place_in_tma_tile(first_row + lane % kTileRows, lane / kTileRows));
  const unsigned scale_place = unsigned(kBlockRows * kLineBytes + (first_row + lane / 4) * 4);
  const unsigned xs_at = shared_address(xs), weights_at = shared_address(weights);
  const int part_shift = 31 - __clz(call.scales.part_units);  // of units, to their part
  const Turns turns(warp / kGroupWarps, true);
  uint32_t factors[2][kBlocks][4];
  int weight_stage = 0, weight_phase = 0, x_stage = 0, x_phase = 0, x_before = 0;
#pragma unroll 1
  for (int line = 0; line < count; ++line) {
    const unsigned near = weights_at + unsigned(weight_stage * places.weight_stage_bytes);
    wait_for(weight_here + weight_stage, weight_phase);
#pragma unroll
    for (int i = 0; i < kXLines; ++i) {
      constexpr int kUnits = kUnitsOfLine / kXLines, kBlocksOfUnit = 8 / kBits;
      uint32_t (&made)[kBlocks][4] = factors[i % 2];
#pragma unroll
      for (int u = 0; u < kUnits; u += 2) {
        const int unit = i * kUnits + u;
        uint32_t words[4];
        load_matrices<false>(words, near + (codes_place ^ unsigned(unit * kUnitBytes)));
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const unsigned at =
              near + scale_place + unsigned(((unit + k) >> part_shift) * kBlockRows * 4);
          const float scale[2] = {load_shared(at), load_shared(at + 8 * 4)};
          float offset[2] = {};
          if (kAsymmetric) {
            offset[0] = load_shared(at + unsigned(places.scale_bytes));
            offset[1] = load_shared(at + unsigned(places.scale_bytes) + 8 * 4);
          }
#pragma unroll
          for (int b = 0; b < kBlocksOfUnit; ++b) {
            uint32_t (&block)[4] = made[(u + k) * kBlocksOfUnit + b];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const uint32_t pair = pair_of<kBits, T>(words[2 * k + j % 2], 2 * b + j / 2);
              block[j] = scaled_pair<T, kAsymmetric, kBits == 4 ? 8 : 128>(pair, scale[j % 2],
                                                                           offset[j % 2]);
            }
          }
        }
      }
      wait_for(x_here + x_stage, x_phase);
      const uint64_t x = tma_tile_factors(xs_at + unsigned(x_stage * kXStageBytes<kColumns>));
      turns.wait();
      begin_products();
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        begin_product<T>(sums, made[b], further(x, unsigned(b * 2 * kUnitBytes)), true);
      }
      end_batch();
      turns.pass();
      if (i + 1 < kXLines) {
        wait_for_batches<1>();
      } else {  // the compiler takes no batch that outlasts a loop's round
        wait_for_batches<0>();
      }
      if (lane < places.sharing) {
        if (i > 0) arrive_in_cluster(x_read + x_before, split + lane);
        if (i + 1 == kXLines) arrive_in_cluster(x_read + x_stage, split + lane);
      }
      x_before = x_stage;
      if (++x_stage == places.x_stages) x_stage = 0, x_phase ^= 1;
    }
    if (lane == 0) arrive(weight_read + weight_stage);
    if (++weight_stage == kWeightStages) weight_stage = 0, weight_phase ^= 1;
  }
  turns.end();
  // Sums go to shared memory, [kColumns][kPitch], and from there, those of a cluster one after the
  // other, to the results: a warp has a row of x, of which a lane has four neighbours.
  cluster_barrier_after_reading(places.cluster());
  float* const near = reinterpret_cast<float*>(xs);
#pragma unroll
  for (int j = 0; j < kColumns / kColumnTile; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = j * kColumnTile + lane % 4 * 2 + i % 2, n = first_row + lane / 4 + i / 2 * 8;
      near[m * kPitch + n] = sums[4 * j + i];
    }
  }
  cluster_barrier(places.cluster());
  const int64_t n = row + lane * 4;
  float bias[4] = {};
  const int there = int(::max(int64_t(0), ::min(call.weight.rows - n, int64_t(4))));
  if (call.bias.is_present()) {
    for (int i = 0; i < there; ++i) bias[i] = widen(call.bias.row<T>(0).address[n + i]);
  }
  const bool even =
      call.weight.rows % 4 == 0 && reinterpret_cast<uintptr_t>(call.out.data) % 8 == 0;
  for (int m = split * kGroups * kGroupWarps + warp; m < kColumns;
       m += kGroups * kGroupWarps * places.splits) {
    if (column + m >= call.rows) break;
    float total[4];
    for (int other = 0; other < places.splits; ++other) {
      float4 four;
      unsigned at = shared_address(near + m * kPitch + lane * 4);
      if (places.splits > 1) {
        asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(other));
      }
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                   : "r"(at)
                   : "memory");
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] = other == 0 ? values[i] : total[i] + values[i];
    }
    T* const out = call.out.even_row<T>(column + m).address + n;
    uint2 words;
    words.x = packed<T>(total[0] + bias[0], total[1] + bias[1]);
    words.y = packed<T>(total[2] + bias[2], total[3] + bias[3]);
    if (even && there == 4) {
      *reinterpret_cast<uint2*>(out) = words;
    } else {
      for (int i = 0; i < there; ++i) out[i] = narrow<T>(total[i] + bias[i]);
    }
  }
  cluster_barrier_after_reading(places.cluster());  // whose shared memory is read from here
#endif
}

// How blocks are cut, and what they have near. So many share the length that most processors have
// one, as long as each has some lines.
template <int kColumns>
many_rows::Places places_of(const ManyRows& call, const Device& device) {
  using namespace many_rows;
  const PackedWeight& weight = call.weight;
  constexpr int kLeastLines = 4, kMostSplits = 4;
  Places places = {};
  places.lines = int(weight.row_bytes / kLineBytes);
  places.column_tiles = int(ceil_div(call.rows, int64_t(kColumns)));
  const int64_t row_tiles = ceil_div(weight.rows, int64_t(kBlockRows));
  const int64_t tiles = row_tiles * places.column_tiles;
  places.splits = places.sharing = 1;
  while (places.splits < kMostSplits && 2 * places.splits * tiles <= device.processors &&
         2 * places.splits * kLeastLines <= places.lines) {
    places.splits *= 2;
  }
  if (places.splits == 1 && row_tiles > 1) places.sharing = 2;
  places.scale_bytes = std::max(call.scales.line_parts, 1) * kBlockRows * int(sizeof(float));
  const int kinds = weight.offsets == nullptr ? 1 : 2;
  const int64_t stage = kBlockRows * kLineBytes + kinds * places.scale_bytes;
  places.weight_stage_bytes = int(ceil_div(stage, int64_t(kTmaTileAlignment))) * kTmaTileAlignment;
  const int most = device.shared_of_block - kTmaTileAlignment - 1024;  // for barriers
  const int left = most - kWeightStages * places.weight_stage_bytes;
  places.x_stages = std::min(left / kXStageBytes<kColumns>, kMostXStages);
  return places;
}

template <class T, int kColumns>
bool make_maps(many_rows::Maps& maps, const many_rows::Places& places, const ManyRows& call) {
  using namespace many_rows;
  const PackedWeight& weight = call.weight;
  const Matrix codes{weight.codes, weight.rows, weight.row_bytes, weight.row_bytes, 1};
  const int64_t pitch = call.rows > 1 ? call.x.pitch : weight.length;
  const Matrix x{call.x.data, call.rows, weight.length, pitch * int64_t(sizeof(T)), int(sizeof(T))};
  const auto of_scales = [&](CUtensorMap& map, const float* data) {
    return data == nullptr ||
           make_tile_map(map, data, call.scales.groups, call.scales.pitch, call.scales.pitch,
                         std::max(call.scales.line_parts, 1), kBlockRows);
  };
  return fits_tma_tiles(codes) && fits_tma_tiles(x) &&
         make_map(maps.weight, codes, kBlockRows, 1) &&
         make_map(maps.x, x, kColumns / places.sharing, 1) &&
         of_scales(maps.scales, weight.scales) && of_scales(maps.offsets, weight.offsets);
}

// Does nothing and returns false if it cannot.
template <class T, int kBits, int kColumns>
bool launch_many_rows(const ManyRows& call, const Device& device, cudaStream_t stream,
                      const char* op) {
  using namespace many_rows;
  const auto kernel = call.weight.offsets == nullptr ? &many_rows_kernel<T, kBits, kColumns, false>
                                                     : &many_rows_kernel<T, kBits, kColumns, true>;
  const Places places = places_of<kColumns>(call, device);
  many_rows::Maps maps = {};
  if (!can_chain(kernel, op) || !make_maps<T, kColumns>(maps, places, call)) return false;
  const int64_t pipeline = int64_t(places.x_stages) * kXStageBytes<kColumns> +
                           int64_t(kWeightStages) * places.weight_stage_bytes;
  const int64_t sums = int64_t(kColumns) * kPitch * int64_t(sizeof(float));
  const int64_t clusters =
      ceil_div(call.weight.rows, int64_t(kBlockRows * places.sharing)) * places.column_tiles;
  const Launch how{unsigned(clusters * places.cluster()), kThreads,
                   std::max(pipeline, sums) + kTmaTileAlignment, places.cluster(), false};
  launch_kernel(kernel, how, stream, op, call, places, maps);
  return true;
}

}  // namespace dsx::cuda
