// The kernel of quantized_many_rows: codes become floats, as unpack_weight makes them, in the
// registers from which warpgroups multiply them, while those before are multiplied.
//
// A block has kBlockRows rows of the weight and kColumns rows of x. Two blocks of a cluster have
// the same rows of x: each brings half of them near, for both. One warp brings lines of codes,
// beside their scales, and lines of x near, each in stages of their own; each of two warpgroups has
// half of the rows of the weight.
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
  int sharing;       // so many blocks, a cluster, share rows of x
  int lines;         // of codes, of all of them
  int column_tiles;  // of x
  int x_stages;
  int scale_bytes, weight_stage_bytes;
  int part_shift;  // from the number of a unit of a line to that of its scales
};

template <int kColumns>
constexpr int kXStageBytes = kColumns * kLineBytes;

// Of stages that have arrived, and that all warps which multiply have read.
struct Barriers {
  Barrier weight_here[kWeightStages], weight_read[kWeightStages];
  Barrier x_here[kMostXStages], x_read[kMostXStages];

  // One thread calls it, before any other goes on.
  __device__ void begin(const Places& places) {
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
};

// What a block has: rows from these on, of the weight and of x.
struct Share {
  int member;  // of those that share rows of x
  int row, column;

  __device__ Share(const Places& places, int columns) {
    member = places.sharing > 1 ? int(rank_in_cluster()) : 0;
    const int tile = int(blockIdx.x) / places.sharing;
    row = (tile / places.column_tiles * places.sharing + member) * kBlockRows;
    column = tile % places.column_tiles * columns;
  }
};

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

// Arrives at where block number `rank` of the cluster has what this one has there. What was read
// before has been, as its products have ended; nothing was written that the other block is to see.
// So the scope is that of this block: a release to the cluster is compiled to a fence of the whole
// device, for which a warp would wait at each stage.
__device__ inline void arrive_in_cluster(Barrier* barrier, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
      " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
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
                                      const Scales& scales, const many_rows::Share& share,
                                      char* weights, char* xs, many_rows::Barriers& barriers) {
  using namespace many_rows;
  constexpr int kXLines = 16 / kBits;
  const uint64_t policy = read_once();
  int weight_stage = 0, weight_phase = 1, x_stage = 0, x_phase = 1;
  const int tiles = scales.offsets == nullptr ? 1 : 2;
  for (int line = 0; line < places.lines; ++line) {
    wait_for(barriers.weight_read + weight_stage, weight_phase);
    Barrier* const here = barriers.weight_here + weight_stage;
    char* const near = weights + weight_stage * places.weight_stage_bytes;
    arrive_expecting(here, kBlockRows * kLineBytes + tiles * places.scale_bytes);
    fetch_tma_tiles(near, maps.weight, share.row, line, here);
    const int group = scales.group_of(line);
    fetch_tile(near + kBlockRows * kLineBytes, maps.scales, share.row, group, here, policy);
    if (tiles == 2) {
      fetch_tile(near + kBlockRows * kLineBytes + places.scale_bytes, maps.offsets, share.row,
                 group, here, policy);
    }
    if (++weight_stage == kWeightStages) weight_stage = 0, weight_phase ^= 1;
    for (int i = 0; i < kXLines; ++i) {
      Barrier* const x_here = barriers.x_here + x_stage;
      char* const x = xs + x_stage * kXStageBytes<kColumns>;
      wait_for(barriers.x_read + x_stage, x_phase);
      arrive_expecting(x_here, kXStageBytes<kColumns>);
      if (places.sharing == 1) {
        fetch_tma_tiles(x, maps.x, share.column, line * kXLines + i, x_here);
      } else {
        fetch_tma_tiles_for_both(x + share.member * kXStageBytes<kColumns> / 2, maps.x,
                                 share.column + share.member * kColumns / 2, line * kXLines + i,
                                 x_here);
      }
      if (++x_stage == places.x_stages) x_stage = 0, x_phase ^= 1;
    }
  }
}

// What a warp has of four blocks of 16 products: its rows of the weight, where codes and scales of
// a line lie from `near` on.
template <class T, int kBits, bool kAsymmetric>
class ManyFactors {
 public:
  static constexpr int kBlocks = 4, kXLines = 16 / kBits;

  __device__ ManyFactors(const many_rows::Places& places, int first_row)
      : part_shift_(places.part_shift), offsets_(unsigned(places.scale_bytes)) {
    const int lane = int(threadIdx.x) % kWarp;
    codes_ = unsigned(place_in_tma_tile(first_row + lane % kTileRows, lane / kTileRows));
    scales_ = unsigned(many_rows::kBlockRows * kLineBytes + (first_row + lane / 4) * 4);
  }

  // Of those beside line number i of x.
  __device__ void make(uint32_t (&blocks)[kBlocks][4], unsigned near, int i) const {
    constexpr int kUnits = kUnitsOfLine / kXLines;
#pragma unroll
    for (int u = 0; u < kUnits; u += 2) {
      const int unit = i * kUnits + u;
      uint32_t words[4];
      load_matrices<false>(words, near + (codes_ ^ unsigned(unit * kUnitBytes)));
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        make_unit(
            blocks, (u + k) * kBlocksOfUnit, words[2 * k], words[2 * k + 1],
            near + scales_ + unsigned(((unit + k) >> part_shift_) * many_rows::kBlockRows * 4));
      }
    }
  }

 private:
  static constexpr int kBlocksOfUnit = 8 / kBits;

  __device__ void make_unit(uint32_t (&blocks)[kBlocks][4], int first, uint32_t low, uint32_t high,
                            unsigned scales) const {
    float scale[2], offset[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned place = scales + unsigned(half * 8 * 4);
      scale[half] = load_shared(place);
      if (kAsymmetric) offset[half] = load_shared(place + offsets_);
    }
#pragma unroll
    for (int b = 0; b < kBlocksOfUnit; ++b) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t pair = pair_of<kBits, T>(j % 2 == 0 ? low : high, 2 * b + j / 2);
        blocks[first + b][j] =
            scaled_pair<T, kAsymmetric, kBits == 4 ? 8 : 128>(pair, scale[j % 2], offset[j % 2]);
      }
    }
  }

  const int part_shift_;  // of units, to their part
  const unsigned offsets_;
  unsigned codes_, scales_;
};

// Makes results of the sums of a block: a warp has a row of x, of which a lane has four neighbours.
template <class T, int kColumns>
__device__ inline void finish_many_rows(const ManyRows& call, const many_rows::Share& share,
                                        const float* sums) {
  using namespace many_rows;
  constexpr int kWarps = kGroups * kGroupWarps;
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const int64_t n = share.row + lane * 4;
  const int there = int(::max(int64_t(0), ::min(call.weight.rows - n, int64_t(4))));
  float bias[4] = {};
  if (call.bias.is_present()) {
    for (int i = 0; i < there; ++i) bias[i] = widen(call.bias.row<T>(0).address[n + i]);
  }
  const bool even =
      call.weight.rows % 4 == 0 && reinterpret_cast<uintptr_t>(call.out.data) % 8 == 0;
  for (int m = warp; m < kColumns; m += kWarps) {
    if (share.column + m >= call.rows) break;
    const float4 four = *reinterpret_cast<const float4*>(sums + m * kPitch + lane * 4);
    const float total[4] = {four.x, four.y, four.z, four.w};
    T* const out = call.out.even_row<T>(share.column + m).address + n;
    if (even && there == 4) {
      uint2 words;
      words.x = packed<T>(total[0] + bias[0], total[1] + bias[1]);
      words.y = packed<T>(total[2] + bias[2], total[3] + bias[3]);
      *reinterpret_cast<uint2*>(out) = words;
    } else {
      for (int i = 0; i < there; ++i) out[i] = narrow<T>(total[i] + bias[i]);
    }
  }
}

// What a warp that multiplies does: adds up the products of its rows, line by line.
template <class T, int kBits, int kColumns, bool kAsymmetric>
__device__ __forceinline__ void multiply_many_rows(float (&sums)[kColumns / 2],
                                                   const ManyFactors<T, kBits, kAsymmetric>& made,
                                                   const many_rows::Places& places,
                                                   const char* weights, const char* xs,
                                                   many_rows::Barriers& barriers) {
  using namespace many_rows;
  constexpr int kBlocks = ManyFactors<T, kBits, kAsymmetric>::kBlocks, kXLines = 16 / kBits;
  const int lane = int(threadIdx.x) % kWarp;
  const unsigned weights_at = shared_address(weights), xs_at = shared_address(xs);
  const Turns turns(int(threadIdx.x) / kWarp / kGroupWarps, true);
  uint32_t factors[2][kBlocks][4];
  int weight_stage = 0, weight_phase = 0, x_stage = 0, x_phase = 0, x_before = 0;
#pragma unroll 1
  for (int line = 0; line < places.lines; ++line) {
    const unsigned near = weights_at + unsigned(weight_stage * places.weight_stage_bytes);
    wait_for(barriers.weight_here + weight_stage, weight_phase);
#pragma unroll
    for (int i = 0; i < kXLines; ++i) {
      made.make(factors[i % 2], near, i);
      wait_for(barriers.x_here + x_stage, x_phase);
      const uint64_t x = tma_tile_factors(xs_at + unsigned(x_stage * kXStageBytes<kColumns>));
      turns.wait();
      begin_products();
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        begin_product<T>(sums, factors[i % 2][b], further(x, unsigned(b * 2 * kUnitBytes)), true);
      }
      end_batch();
      turns.pass();
      if (i + 1 < kXLines) {
        wait_for_batches<1>();
      } else {  // the compiler takes no batch that outlasts a loop's round
        wait_for_batches<0>();
      }
      if (lane < places.sharing) {
        if (i > 0) arrive_in_cluster(barriers.x_read + x_before, lane);
        if (i + 1 == kXLines) arrive_in_cluster(barriers.x_read + x_stage, lane);
      }
      x_before = x_stage;
      if (++x_stage == places.x_stages) x_stage = 0, x_phase ^= 1;
    }
    if (lane == 0) arrive(barriers.weight_read + weight_stage);
    if (++weight_stage == kWeightStages) weight_stage = 0, weight_phase ^= 1;
  }
  turns.end();
}

template <class T, int kBits, int kColumns, bool kAsymmetric>
__global__ void __launch_bounds__(many_rows::kThreads, 1)
    many_rows_kernel(const __grid_constant__ ManyRows call,
                     const __grid_constant__ many_rows::Places places,
                     const __grid_constant__ many_rows::Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using namespace many_rows;
  extern __shared__ __align__(16) char shared[];
  __shared__ Barriers barriers;
  char* const xs = reinterpret_cast<char*>(
      ceil_div(reinterpret_cast<uintptr_t>(shared), uintptr_t(kTmaTileAlignment)) *
      kTmaTileAlignment);
  char* const weights = xs + places.x_stages * kXStageBytes<kColumns>;
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const many_rows::Share share(places, kColumns);
  if (threadIdx.x == 0) barriers.begin(places);
  cluster_barrier(places.sharing);
  if (warp >= kGroups * kGroupWarps) {
    give_registers<kCopyingRegisters>();
    if (warp == kGroups * kGroupWarps && lane == 0) {
      copy_many_rows<kBits, kColumns>(maps, places, call.scales, share, weights, xs, barriers);
    }
    __syncwarp();
    cluster_barrier_after_reading(places.sharing);
    __syncthreads();
    return;
  }
  take_registers<kMultiplyingRegisters>();
  const int first_row = warp * kTileRows;  // of the block's
  const ManyFactors<T, kBits, kAsymmetric> made(places, first_row);
  float sums[kColumns / 2];
#pragma unroll
  for (int j = 0; j < kColumns / kColumnTile; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[4 * j + i] = 0;
  }
  multiply_many_rows<T, kBits, kColumns>(sums, made, places, weights, xs, barriers);
  cluster_barrier_after_reading(places.sharing);     // nobody arrives at others' barriers after it
  float* const near = reinterpret_cast<float*>(xs);  // [kColumns][kPitch]
#pragma unroll
  for (int j = 0; j < kColumns / kColumnTile; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = j * kColumnTile + lane % 4 * 2 + i % 2, n = first_row + lane / 4 + i / 2 * 8;
      near[m * kPitch + n] = sums[4 * j + i];
    }
  }
  __syncthreads();
  finish_many_rows<T, kColumns>(call, share, near);
#endif
}

// How blocks are cut, and what they have near.
template <int kColumns>
many_rows::Places places_of(const ManyRows& call, const Device& device) {
  using namespace many_rows;
  const PackedWeight& weight = call.weight;
  Places places = {};
  places.lines = int(weight.row_bytes / kLineBytes);
  places.column_tiles = int(ceil_div(call.rows, int64_t(kColumns)));
  const int64_t row_tiles = ceil_div(weight.rows, int64_t(kBlockRows));
  places.sharing = row_tiles > 1 ? 2 : 1;
  places.scale_bytes = std::max(call.scales.line_parts, 1) * kBlockRows * int(sizeof(float));
  while (2 << places.part_shift <= call.scales.part_units) ++places.part_shift;
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
  const Launch how{unsigned(clusters * places.sharing), kThreads,
                   std::max(pipeline, sums) + kTmaTileAlignment, places.sharing, false};
  launch_kernel(kernel, how, stream, op, call, places, maps);
  return true;
}

}  // namespace dsx::cuda
