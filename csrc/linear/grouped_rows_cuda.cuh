// Skinny GEMMs side by side on CUDA, of rows that have weights of their own. Blocks stay: each goes
// from one share of the work to the next, and while it makes results of one, the copy engine brings
// the next one near. The host knows how many rows there are, not whose they are.
#pragma once

#include "linear/few_rows_kernel_cuda.cuh"
#include "linear/grouped_rows.h"

namespace dsx::cuda {

constexpr int kMostShares = int(kMostGroupedRows);
constexpr int kGroupedWarps = 7;  // that multiply in a block, of two at a time on a processor
constexpr int kGroupedThreads = (kGroupedWarps + 1) * kWarp;
constexpr int kBlocksAtOnce = 2;

// Whose the rows are.
struct RowGroups {
  int64_t experts;
  const int32_t* offsets;  // see grouped_rows.h
};

// An offset as a row; of those that lie beyond the rows, any.
__device__ inline int row_of(int offset, int rows) { return ::min(::max(offset, 0), rows); }

// All shares, in shared memory: each has rows of one expert.
template <int kOfShare>
class Shares {
 public:
  // All threads of a warp call it. A lane has some experts that are neighbours, whose offsets are
  // all asked for before any is there.
  __device__ void find(const RowGroups& groups, int rows) {
    const int lane = int(threadIdx.x) % kWarp, experts = int(groups.experts);
    int before = 0;
    for (int first = 0; first < experts; first += kOfLane * kWarp) {
      const int own = first + lane * kOfLane;
      int ends[kOfLane + 1];  // of the expert before, then of each
#pragma unroll
      for (int i = 0; i <= kOfLane; ++i) {
        const int expert = own + i - 1;
        ends[i] = expert < 0 ? 0 : row_of(groups.offsets[::min(expert, experts - 1)], rows);
      }
      int mine = 0;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) mine += shares_of(ends[i + 1] - ends[i]);
      int until = mine;  // shares of the lanes up to this one
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        const int others = __shfl_up_sync(0xffffffff, until, distance);
        if (lane >= distance) until += others;
      }
      int at = before + until - mine;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        for (int begin = ends[i]; begin < ends[i + 1]; begin += kOfShare, ++at) {
          if (at >= kMostShares) break;  // of offsets that fall
          experts_[at] = own + i;
          begins_[at] = int16_t(begin);
          counts_[at] = int16_t(::min(kOfShare, ends[i + 1] - begin));
        }
      }
      before += __shfl_sync(0xffffffff, until, kWarp - 1);
      if (lane == kWarp - 1) end_ = ends[kOfLane];
    }
    if (lane == 0) count_ = ::min(before, kMostShares);
  }

  __device__ int count() const { return count_; }
  __device__ Share at(int i) const { return {experts_[i], begins_[i], counts_[i]}; }
  __device__ int end() const { return end_; }  // of the rows of all experts

 private:
  static constexpr int kOfLane = 4;

  __device__ static int shares_of(int rows) { return ::max(rows + kOfShare - 1, 0) / kOfShare; }

  int count_, end_, experts_[kMostShares];
  int16_t begins_[kMostShares], counts_[kMostShares];  // of up to kMostGroupedRows
};

// Zeros in the rows from `end` on: each block has some of them. All threads call it.
template <class T>
__device__ inline void clear_rows_of_nobody(const FewRows& call, int end) {
  for (int row = end + int(blockIdx.x); row < call.rows; row += int(gridDim.x)) {
    T* const out = call.out.even_row<T>(row).address;
    for (int64_t i = threadIdx.x; i < call.columns; i += blockDim.x) out[i] = narrow<T>(0.0f);
  }
}

// A barrier of the threads that multiply.
__device__ inline void multiplying_barrier(int threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

template <class Kind, int kColumnTiles>
__global__ void __launch_bounds__(kGroupedThreads, kBlocksAtOnce)
    grouped_rows_kernel(const __grid_constant__ typename Kind::Call call,
                        const __grid_constant__ Geometry geometry,
                        const __grid_constant__ Maps<Kind::kScaled> maps) {
  using T = typename Kind::T;
  using Products = typename Kind::template Products<kColumnTiles>;
  extern __shared__ __align__(16) char shared[];
  __shared__ Barrier here[kMostStages], read[kMostStages];
  __shared__ Shares<kColumnTiles * kColumnTile> shares;
  char* const pipeline = reinterpret_cast<char*>(
      ceil_div(reinterpret_cast<uintptr_t>(shared), uintptr_t(kTmaTileAlignment)) *
      kTmaTileAlignment);
  char* const of_sums = pipeline + geometry.stages * geometry.stage_bytes;
  const int warp = int(threadIdx.x) / kWarp, multiplying = geometry.groups * geometry.tiles;

  let_next_begin();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < geometry.stages; ++stage) {
      begin_barrier(here + stage, Copies<Kind>::arrivals(geometry));
      begin_barrier(read + stage, multiplying);
    }
    show_barriers();
  }
  if (warp == multiplying) ask_for_maps(geometry, maps);
  wait_for_previous();
  if (warp == multiplying) shares.find(call.groups, int(call.rows));
  __syncthreads();

  const int works = shares.count() * geometry.of_share;
  Cursor at{0, warp == multiplying};
  for (int work = int(blockIdx.x); work < works; work += int(gridDim.x)) {
    const Share share = shares.at(work / geometry.of_share);
    const WeightRows rows(call, geometry, share, unsigned(work % geometry.of_share));
    if (warp == multiplying) {
      copy(Copies<Kind>(call, geometry, maps, rows, pipeline, here), geometry, 0, read, at);
      continue;
    }
    const int group = geometry.group_of(warp);
    const int first_row = (warp - group * geometry.tiles) * kTileRows;
    float totals[Products::kSums];
    Products products(call, geometry, rows, first_row);
    multiply(products, geometry, group * geometry.group_k_parts * geometry.k_part_lines,
             pipeline + group * geometry.group_bytes, here, read, at, totals);
    const Sums sums(of_sums, share, geometry);
    multiplying_barrier(multiplying * kWarp);  // nobody reads those before any more
    Sender(sums, geometry, rows, group, first_row).send(totals);
    multiplying_barrier(multiplying * kWarp);
    Finisher<T>(call, geometry, rows, sums, 0).finish(nullptr);
  }
  clear_rows_of_nobody<T>(call, shares.end());
}

// Microseconds, about: of 1 KiB of the weight, if all blocks read; of the products of a line; of
// what there is to do about a share besides.
constexpr double kReading = 0.055, kLineOfFloats = 0.2, kLineOfCodes = 0.8, kBesides = 1;

// How many tiles a block works on at a time, and by how many groups of warps: so that it takes the
// least time if all experts have rows that may.
template <class Kind, int kColumnTiles>
void divide_groups(Geometry& geometry, const typename Kind::Call& call, int64_t blocks) {
  const auto weight = Kind::weight(call);
  const int64_t bytes = weight.length * int64_t(sizeof(typename Kind::Weight));
  const double lines = double(ceil_div(bytes, int64_t(kLineBytes)));
  const int64_t shares = std::min(call.groups.experts, call.rows);
  const int64_t tiles = ceil_div(call.weight_rows(), int64_t(kTileRows));
  constexpr int kMostSplit = Kind::template Products<kColumnTiles>::kInOrder ? 1 : kSplitKParts;
  double least = INFINITY;
  geometry.cluster = geometry.copying = 1;
  for (int groups = 1; groups <= kMostSplit; groups *= 2) {
    for (int each = 1; each * groups <= kGroupedWarps; ++each) {
      const int64_t rounds = ceil_div(shares * ceil_div(tiles, int64_t(each)), blocks);
      const double reading = kReading / 1024 * double(each * kTileRows * bytes);
      const double products = lines / groups * (Kind::kScaled ? kLineOfCodes : kLineOfFloats);
      const double time = double(rounds) * (std::max(reading, products) + kBesides);
      if (time > least) continue;
      least = time;
      geometry.groups = groups;
      geometry.tiles = each;
    }
  }
}

template <class Kind, int kColumnTiles>
void launch_grouped_rows(const typename Kind::Call& call, const Device& device, cudaStream_t stream,
                         const char* op) {
  const auto kernel = &grouped_rows_kernel<Kind, kColumnTiles>;
  const bool chained = can_chain(kernel, op);
  const int64_t blocks = int64_t(kBlocksAtOnce) * device.processors;
  Geometry geometry = {};
  divide_groups<Kind, kColumnTiles>(geometry, call, blocks);
  set_places<Kind, kColumnTiles>(geometry, call, geometry.threads() - kWarp);
  geometry.of_share = int(ceil_div(call.columns, int64_t(geometry.columns)));
  const int64_t sums =
      int64_t(geometry.groups) * geometry.x_rows * geometry.sums_pitch * int64_t(sizeof(float));
  const int most = (device.shared_of_block - 1024) / kBlocksAtOnce - 1024 - kTmaTileAlignment -
                   int(sums) - int(sizeof(Shares<kColumnTiles * kColumnTile>));
  while (geometry.lines > 1 && 3 * geometry.stage_bytes > most) {
    geometry.set_lines(geometry.lines / 2);
  }
  geometry.stages = std::clamp(most / geometry.stage_bytes, 1, kMostStages);
  Maps<Kind::kScaled> maps = {};
  geometry.by_engine = chained && make_maps<Kind>(maps, call, boxes_of_stage(geometry));
  geometry.weight_aligned = Kind::weight(call).is_aligned();
  geometry.x_aligned = Kind::x(call).is_aligned();
  const int64_t pipeline = int64_t(geometry.stages) * geometry.stage_bytes;
  const Launch how{unsigned(blocks), geometry.threads(), pipeline + sums + kTmaTileAlignment, 1,
                   chained};
  launch_kernel(kernel, how, stream, op, call, geometry, maps);
}

// Brings rows of tokens to their slots: a block has one.
static __global__ void __launch_bounds__(256)
    gather_rows_kernel(const __grid_constant__ GroupedRows call, char* out) {
  let_next_begin();
  wait_for_previous();
  const int64_t row = call.slots[blockIdx.x], bytes = call.length * bytes_of(call.x.dtype);
  if (row < 0 || row >= call.rows) return;
  const char* const from = static_cast<const char*>(call.x.row<Any>(blockIdx.x / call.k).address);
  char* const to = out + row * bytes;
  if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | uintptr_t(bytes)) %
          sizeof(uint4) ==
      0) {
    for (int64_t i = threadIdx.x; i < bytes / int64_t(sizeof(uint4)); i += blockDim.x) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    return;
  }
  for (int64_t i = threadIdx.x; i < bytes / 2; i += blockDim.x) {
    reinterpret_cast<uint16_t*>(to)[i] = reinterpret_cast<const uint16_t*>(from)[i];
  }
}

// Whether rows of x have to be copied first: all are those of one token, if there is one.
inline bool are_gathered(const GroupedRows& call) {
  return call.slots != nullptr && call.tokens > 1;
}
inline int64_t gathered_bytes(const GroupedRows& call) {
  const int64_t bytes = are_gathered(call) ? call.rows * call.length * bytes_of(call.x.dtype) : 0;
  return ceil_div(bytes, int64_t(256)) * 256;
}

// All but the weight and whose rows there are; x lies as the results do, at `near` if need be.
inline FewRows few_rows_of(const GroupedRows& call, void* near, cudaStream_t stream,
                           const char* op) {
  FewRows few = form_of(call);
  few.rows = call.rows;
  few.bias = call.bias;
  few.out = call.out;
  if (are_gathered(call)) {
    const Launch how{unsigned(call.rows), 256, 0, 1, can_chain(gather_rows_kernel, op)};
    launch_kernel(gather_rows_kernel, how, stream, op, call, static_cast<char*>(near));
    few.x = {near, call.length, call.x.dtype};
  } else if (call.slots != nullptr) {
    few.x = {call.x.data, 0, call.x.dtype};
  }
  return few;
}

// Calls body with the number of groups of 8 rows of a share: twice what an expert usually has.
template <class Body>
void with_rows_of_share(const GroupedRows& call, const Body& body) {
  if (call.rows <= 4 * std::min(call.experts, call.rows))
    return body(std::integral_constant<int, 1>{});
  body(std::integral_constant<int, 2>{});
}

}  // namespace dsx::cuda
