// Skinny GEMMs on CUDA: the kernel, and how it is launched. The length is cut into 4 split-K parts,
// which are added in pairs; within a part products are added in their order. A warp adds up some
// parts for 16 rows of the weight, the blocks of a cluster and the groups of a block have some
// each; how many makes no difference to any sum.
#pragma once

#include <algorithm>

#include "common/cuda/device.cuh"
#include "common/cuda/warpgroup_mma.cuh"
#include "linear/few_rows_sums_cuda.cuh"

namespace dsx::cuda {

constexpr int64_t kAskedOf = 64 << 20;  // bytes of a weight at most, to ask for some ahead
// Bytes of the weight: less would keep the copy engine too busy, which has more to do with scales.
template <bool kScaled>
constexpr int kCopiedAtOnce = (kScaled ? 16 : 8) * 1024;

// Where a warp is in the pipeline. Of one that copies, what has not begun counts as phase 1 that
// has ended.
struct Cursor {
  int stage, phase;

  __device__ void advance(const Geometry& geometry) {
    if (++stage == geometry.stages) stage = 0, phase ^= 1;
  }
};

// What a warp that copies does for some rows of the weight.
template <class Kind>
__device__ void copy(const Copies<Kind>& copies, const Geometry& geometry, int rank, Barrier* read,
                     Cursor& at) {
  for (int k_part = 0; k_part < geometry.group_k_parts; ++k_part) {
    for (int step = 0; step < geometry.k_part_steps; ++step) {
      wait_together_for(read + at.stage, at.phase);
      copies.begin(rank, k_part, step, at.stage);
      at.advance(geometry);
    }
  }
}

// What a warp that multiplies does, from line number `first` of the weight on: stage by stage,
// split-K part by part.
template <class Products>
__device__ void multiply(Products& products, const Geometry& geometry, int first,
                         const char* pipeline, Barrier* here, Barrier* read, Cursor& at,
                         float (&totals)[Products::kSums]) {
  // Kept in registers: what they are worked out of takes long to read.
  unsigned here_at = shared_address(here), read_at = shared_address(read);
  asm volatile("" : "+r"(here_at), "+r"(read_at));
  constexpr unsigned kStep = sizeof(Barrier);
  [[maybe_unused]] Pairwise<Products::kSums, Products::kFillsRegisters> pairwise;
  int number = first;
  for (int k_part = 0; k_part < geometry.group_k_parts; ++k_part) {
    if (k_part == 0 || !Products::kInOrder) products.clear();
    for (int left = geometry.k_part_lines; left > 0; left -= geometry.lines) {
      const char* const near = pipeline + at.stage * geometry.stage_bytes;
      const int count = ::min(left, geometry.lines);
      wait_for(here_at + unsigned(at.stage) * kStep, at.phase);
#pragma unroll 1  // instructions are read from memory, too
      for (int l = 0; l < count; ++l) products.add(near, l, number + l);
      number += count;
      __syncwarp();
      if (threadIdx.x % kWarp == 0) arrive(read_at + unsigned(at.stage) * kStep);
      at.advance(geometry);
    }
    if constexpr (!Products::kInOrder) {
      products.copy_sums(totals);
      pairwise.add(totals);
    }
  }
  if constexpr (Products::kInOrder) products.copy_sums(totals);
}

// The same where warps multiply together, line by line.
template <class Products>
__device__ __forceinline__ void multiply_together(Products& products, const Geometry& geometry,
                                                  int first, const char* pipeline, Barrier* here,
                                                  Barrier* read, float (&totals)[Products::kSums]) {
  Pairwise<Products::kSums, true> pairwise;
  products.with_part_units([&](auto units) {
    Cursor at{0, 0};
    int number = first;
    for (int k_part = 0; k_part < geometry.group_k_parts; ++k_part) {
      products.clear();
#pragma unroll 1
      for (int left = geometry.k_part_lines; left > 0; --left) {
        const char* const near = pipeline + at.stage * geometry.stage_bytes;
        wait_for(here + at.stage, at.phase);
        products.template add<decltype(units)::value>(near, number++);
        __syncwarp();
        if (threadIdx.x % kWarp == 0) arrive(read + at.stage);
        at.advance(geometry);
      }
      products.template end<decltype(units)::value>();
      products.copy_sums(totals);
      pairwise.add(totals);
    }
    products.end_turns();
  });
}

// Where warps multiply together, the one that copies has others beside it, whose registers they
// take.
template <class Kind>
constexpr int kCopyingWarps = Kind::kTogether > 1 ? kGroupWarps : 1;
template <class Kind, int kColumnTiles>
constexpr int kFewRowsThreads =
    (Kind::template kMostWarps<kColumnTiles> + kCopyingWarps<Kind>)*kWarp;
constexpr int kMultiplyingRegisters = 216, kCopyingRegisters = 72;

template <class Kind, int kColumnTiles>
__global__ void __launch_bounds__(kFewRowsThreads<Kind, kColumnTiles>,
                                  kColumnTiles > 2 || kFewRowsThreads<Kind, kColumnTiles> > 256 ? 1
                                                                                                : 2)
    few_rows_kernel(const __grid_constant__ typename Kind::Call call,
                    const __grid_constant__ Geometry geometry,
                    const __grid_constant__ Maps<Kind::kScaled> maps) {
  using T = typename Kind::T;
  using Products = typename Kind::template Products<kColumnTiles>;
  constexpr bool kTogether = Kind::kTogether > 1;
  extern __shared__ __align__(16) char shared[];
  __shared__ Barrier here[kMostStages], read[kMostStages];
  __shared__ float inverses[kMostRows];
  char* const pipeline = reinterpret_cast<char*>(
      ceil_div(reinterpret_cast<uintptr_t>(shared), uintptr_t(kTmaTileAlignment)) *
      kTmaTileAlignment);
  const int rank = geometry.cluster > 1 ? int(rank_in_cluster()) : 0;
  const int warp = int(threadIdx.x) / kWarp, multiplying = geometry.groups * geometry.tiles;
  const Share share{0, 0, int(call.rows)};
  const WeightRows rows(call, geometry, share, blockIdx.x >> geometry.cluster / 2);  // 1, 2 or 4

  let_next_begin();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < geometry.stages; ++stage) {
      begin_barrier(here + stage, Copies<Kind>::arrivals(geometry));
      begin_barrier(read + stage, multiplying);
    }
    show_barriers();
  }
  __syncthreads();

  const bool copying = warp >= multiplying;
  if (kTogether && copying) give_registers<kCopyingRegisters>();
  if (copying && warp == multiplying) {  // before all that takes time
    const Copies<Kind> copies(call, geometry, maps, rows, pipeline, here);
    copies.ask_ahead(rank);
    wait_for_previous();
    Cursor at{0, 1};
    copy(copies, geometry, rank, read, at);
    __syncwarp();
  }
  if (kTogether && copying) {  // others finish
    cluster_barrier_after_reading(geometry.cluster);
    cluster_barrier(geometry.cluster);
    return;
  }
  if (kTogether) take_registers<kMultiplyingRegisters>();
  const int group = geometry.group_of(warp);
  const int first_row = (warp - group * geometry.tiles) * kTileRows;
  const Sums sums(pipeline, share, geometry);
  Finisher<T> finisher(call, geometry, rows, sums, rank);
  const Sender sender(sums, geometry, rows, rank * geometry.groups + group, first_row);
  float totals[Products::kSums];
  if (!copying) {
    if (call.squares.is_present() && call.inverses == nullptr) {  // while data is on its way
      wait_for_previous();
      find_inverses<(kColumnTiles > 1 ? 4 : 2)>(call, inverses, warp, multiplying);
    }
    Products products(call, geometry, rows, first_row);
    const int first =
        (rank * geometry.groups + group) * geometry.group_k_parts * geometry.k_part_lines;
    const char* const of_group = pipeline + group * geometry.group_bytes;
    if constexpr (kTogether) {
      multiply_together(products, geometry, first, of_group, here, read, totals);
    } else {
      Cursor at{0, 0};
      multiply(products, geometry, first, of_group, here, read, at, totals);
    }
    wait_for_previous();
  }
  cluster_barrier_after_reading(geometry.cluster);  // no stage is needed any more, in any block
  if (!copying) sender.send(totals);
  cluster_barrier(geometry.cluster);
  finisher.finish(call.inverses == nullptr ? inverses : call.inverses);
}

// Blocks of a launch, whose clusters have so many tiles each.
inline int64_t blocks_of(int64_t tiles, int of_cluster, int cluster) {
  return ceil_div(tiles, int64_t(of_cluster)) * cluster;
}

// How many tiles make for the least work of the busiest processor: some multiple of `step`. A block
// costs it an eighth of a tile besides, so that small ones do not win by less than they cost.
inline int tiles_of_cluster(int64_t tiles, int step, int most, int cluster, int processors) {
  int best = step;
  int64_t least = INT64_MAX;
  for (int each = step; each <= most; each += step) {
    const int64_t blocks = ceil_div(blocks_of(tiles, each, cluster), int64_t(processors));
    const int64_t work = (8 * each + 1) * blocks;
    if (work <= least) least = work, best = each;
  }
  return best;
}

// So many warps for each row of the weight that processors are busy. They are in one block unless
// that would leave most processors without any, or each block with few rows beside many of x.
template <class Kind, int kColumnTiles>
void divide(Geometry& geometry, const typename Kind::Call& call, const Device& device,
            bool chained) {
  const int64_t tiles = ceil_div(call.weight_rows(), kTileRows);
  const auto are_few = [&](int64_t blocks) { return 10 * blocks < 9 * device.processors; };
  constexpr int kMost = Kind::template kMostWarps<kColumnTiles>, kStep = Kind::kTogether;
  const auto tiles_beside = [&](int groups) {
    return tiles_of_cluster(tiles, kStep, kMost / groups, geometry.cluster, device.processors);
  };
  geometry.cluster = geometry.groups = 1;
  geometry.copying = kCopyingWarps<Kind>;
  if (kStep > 1) {
    while (geometry.cluster < kSplitKParts && are_few(ceil_div(tiles, kStep) * geometry.cluster)) {
      geometry.cluster *= 2;
    }
    geometry.tiles = tiles_beside(1);
    const int k_parts = kSplitKParts / geometry.cluster;
    while (2 * geometry.groups <= k_parts && 2 * geometry.groups * geometry.tiles <= kMost) {
      geometry.groups *= 2;
    }
    return;
  }
  const int most_split = Kind::template Products<kColumnTiles>::kInOrder ? 1 : kSplitKParts;
  int split = 1;
  if (Kind::kScaled) {  // codes take work: as many warps as there may be
    const int64_t of_block = ceil_div(tiles, int64_t(device.processors));
    while (split < most_split && 2 * split * of_block <= kMost) split *= 2;
  }
  while (split < most_split && are_few(tiles * split / 4)) split *= 2;
  // Two blocks that have half of the length each get it in larger pieces, and half as much of x.
  if (chained && split == kSplitKParts && (Kind::kScaled || call.rows > 16)) geometry.cluster = 2;
  // Of a norm after the layer, a block has whole sums of squares.
  const int most_cluster = call.scaled.is_present() ? kTileRows / kSquared : split;
  while (chained && geometry.cluster < std::min(split, most_cluster) &&
         are_few(3 * tiles * geometry.cluster)) {
    geometry.cluster *= 2;
  }
  geometry.groups = split / geometry.cluster;
  geometry.tiles = tiles_beside(geometry.groups);
}

// What follows from how warps are divided.
template <class Kind, int kColumnTiles>
void set_places(Geometry& geometry, const typename Kind::Call& call, int finishers) {
  geometry.columns = geometry.rows() / (call.gated ? 2 : 1) / geometry.cluster;
  // So that the rows of x that the threads of a warp have are in different banks.
  geometry.sums_pitch = int(ceil_div(geometry.rows() / geometry.cluster, 16)) * 16 + 4;
  geometry.finished_rows = finishers / geometry.columns;
  geometry.column_magic = uint32_t(ceil_div(int64_t(1) << 32, int64_t(geometry.columns)));
  const int64_t column_tiles =
      Kind::kTogether > 1
          ? kColumnTiles
          : std::min(ceil_div(call.rows, int64_t(kColumnTile)), int64_t(kColumnTiles));
  geometry.x_rows = int(column_tiles) * kColumnTile;
  geometry.x_lines = Kind::kXLines;
  if constexpr (Kind::kScaled) {
    const Scales scales = Kind::scales(call);
    geometry.scale_lines = std::max(scales.line_parts, 1);
    geometry.scale_tiles = (scales.offsets == nullptr ? 1 : 2) * (call.gated ? 2 : 1);
  }
  const int64_t line = kLineBytes / int64_t(sizeof(typename Kind::Weight));
  geometry.k_part_lines =
      int(ceil_div(ceil_div(Kind::weight(call).length, line), int64_t(kSplitKParts)));
  int lines = geometry.x_rows > 16 && Kind::kTogether == 1 ? 2 : 1;
  while (Kind::kTogether == 1 &&
         geometry.rows() * lines * kLineBytes < kCopiedAtOnce<Kind::kScaled>)
    lines *= 2;
  while (geometry.k_part_lines % lines != 0) lines /= 2;
  geometry.set_lines(lines);
}

template <class Kind, int kColumnTiles>
Geometry geometry_of(const typename Kind::Call& call, const Device& device, bool chained) {
  Geometry geometry = {};
  divide<Kind, kColumnTiles>(geometry, call, device, chained);
  const int others = Kind::kTogether > 1 ? geometry.copying * kWarp : 0;  // who finish nothing
  set_places<Kind, kColumnTiles>(geometry, call, geometry.threads() - others);
  return geometry;
}

// As many stages as fit beside another block, if there is one.
template <class Kind, int kColumnTiles>
void set_stages(Geometry& geometry, const Device& device, int64_t blocks) {
  const int most = device.shared_of_block - kTmaTileAlignment - 1024;  // for barriers and inverses
  while (geometry.lines > 1 && 3 * geometry.stage_bytes > most) {
    geometry.set_lines(geometry.lines / 2);
  }
  const bool beside = blocks > device.processors && geometry.x_rows <= 16 &&
                      kFewRowsThreads<Kind, kColumnTiles> <= 256;  // see launch bounds
  const int budget = beside ? most / 2 - 1024 : most;
  const int fitting = std::clamp(budget / geometry.stage_bytes, 1, kMostStages);
  const int all = geometry.k_part_steps * geometry.group_k_parts;
  geometry.stages = std::clamp(all, 1, fitting);
  // What is asked for too long before it is read is thrown out of the cache again. While codes are
  // worked on memory has time for more, unless all split-K parts are asked for at once.
  constexpr bool kTogether = Kind::kTogether > 1;  // beside many rows of x, which nobody asks for
  const int bytes = kTogether ? geometry.groups * geometry.x_place : geometry.stage_bytes;
  const bool is_small = blocks * all * bytes <= kAskedOf;
  const bool more = Kind::kScaled && !kTogether && geometry.group_k_parts > 1;
  geometry.asked = is_small ? std::min(geometry.k_part_steps, all / (more ? 8 : 16)) : 0;
}

// What the copy engine brings at a time: some rows by some lines of each.
struct Boxes {
  int weight_rows, weight_lines, x_rows, x_lines, scale_rows, scale_columns;
};

inline Boxes boxes_of_stage(const Geometry& geometry) {
  const int columns = geometry.columns * geometry.cluster, lines = geometry.lines;
  return {columns, lines, geometry.x_rows, lines * geometry.x_lines, lines * geometry.scale_lines,
          columns};
}

// Whether all that comes near can be copied by the engine; makes maps for it.
template <class Kind>
bool make_maps(Maps<Kind::kScaled>& maps, const typename Kind::Call& call, const Boxes& boxes) {
  const Matrix weight = Kind::weight(call).matrix(), x = Kind::x(call).matrix();
  if (Kind::x(call).rows.group != 0 || Kind::weight(call).rows.group != 0) return false;
  if (!fits_tma_tiles(weight) || !fits_tma_tiles(x)) return false;
  if (!make_map(maps.weight, weight, boxes.weight_rows, boxes.weight_lines)) return false;
  if (!make_map(maps.x, x, boxes.x_rows, boxes.x_lines)) return false;
  if constexpr (Kind::kScaled) {
    // A rectangle of floats begins at a multiple of 16 bytes.
    if ((call.gated || Kind::kGrouped) && call.columns % 4 != 0) return false;
    const Scales scales = Kind::scales(call);
    const auto make = [&](CUtensorMap& map, const float* data) {
      return make_tile_map(map, data, scales.groups, scales.pitch, scales.pitch, boxes.scale_rows,
                           boxes.scale_columns);
    };
    if (!make(maps.scales, scales.scales)) return false;
    if (scales.offsets != nullptr && !make(maps.offsets, scales.offsets)) return false;
  }
  return true;
}

// Writes call.inverses, if the kernel is to read them.
inline void launch_inverses(const FewRows& call, cudaStream_t stream, const char* op) {
  if (call.inverses == nullptr) return;
  const Launch how{unsigned(call.rows), kWarp, 0, 1, can_chain(inverses_kernel, op)};
  launch_kernel(inverses_kernel, how, stream, op, call);
}

// Does nothing and returns false if it cannot: warps that multiply together take what the copy
// engine has copied.
template <class Kind, int kColumnTiles>
bool launch_few_rows(const typename Kind::Call& call, const Device& device, cudaStream_t stream,
                     const char* op) {
  const auto kernel = &few_rows_kernel<Kind, kColumnTiles>;
  const bool chained = can_chain(kernel, op);
  Geometry geometry = geometry_of<Kind, kColumnTiles>(call, device, chained);
  const int64_t columns = geometry.columns * geometry.cluster;
  const int64_t blocks = ceil_div(call.columns, columns) * geometry.cluster;
  set_stages<Kind, kColumnTiles>(geometry, device, blocks);
  Maps<Kind::kScaled> maps = {};
  geometry.by_engine = chained && make_maps<Kind>(maps, call, boxes_of_stage(geometry));
  if (Kind::kTogether > 1 && !geometry.by_engine) return false;
  geometry.weight_aligned = Kind::weight(call).is_aligned();
  geometry.x_aligned = Kind::x(call).is_aligned();
  const int64_t sums = int64_t(geometry.cluster * geometry.groups) * call.rows *
                       geometry.sums_pitch * int64_t(sizeof(float));
  const int64_t pipeline = int64_t(geometry.stages) * geometry.stage_bytes;
  const Launch how{unsigned(blocks), geometry.threads(),
                   std::max(pipeline, sums) + kTmaTileAlignment, geometry.cluster, chained};
  launch_inverses(call, stream, op);
  launch_kernel(kernel, how, stream, op, call, geometry, maps);
  return true;
}

// Calls body with the number of groups of 8 rows of x that the code is for.
template <class Body>
void with_column_tiles(int64_t rows, const Body& body) {
  if (rows <= 8) return body(std::integral_constant<int, 1>{});
  if (rows <= 16) return body(std::integral_constant<int, 2>{});
  if (rows <= 32) return body(std::integral_constant<int, 4>{});
  body(std::integral_constant<int, 8>{});
}

}  // namespace dsx::cuda
