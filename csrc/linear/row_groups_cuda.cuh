// Skinny GEMMs on CUDA whose rows have weights of their own: which of them a block works on. The
// host knows how many rows there are, not whose: it launches blocks for as many shares as there can
// be.
#pragma once

#include "linear/few_rows_cuda.cuh"
#include "linear/row_groups.h"

namespace dsx::cuda {

// How many shares of so many rows at the most there can be.
inline int64_t most_shares(const RowGroups& groups, int64_t rows, int64_t of_share) {
  const int64_t experts = std::min(groups.experts, rows);
  return (rows + experts * (of_share - 1)) / of_share;
}

// Which rows are those of an expert; of offsets that fall, or lie beyond the rows, any.
struct RowsOfExpert {
  int begin, end;

  __device__ RowsOfExpert(const RowGroups& groups, int rows, int64_t expert)
      : begin(expert == 0 ? 0 : within(groups.offsets[expert - 1], rows)),
        end(within(groups.offsets[expert], rows)) {}

  __device__ static int within(int offset, int rows) { return ::min(::max(offset, 0), rows); }
  __device__ int shares(int of_share) const {
    return end <= begin ? 0 : (end - begin + of_share - 1) / of_share;
  }
};

// Finds share number `wanted`; leaves what is found as it is if there are not so many. All threads
// of a warp call it.
template <int kOfShare>
__device__ inline void find_share(const RowGroups& groups, int rows, int wanted, Share& found) {
  const int lane = int(threadIdx.x) % kWarp;
  int before = 0;
#pragma unroll 4  // loads in flight
  for (int64_t first = 0; first < groups.experts; first += kWarp) {
    const int64_t expert = ::min(first + lane, groups.experts - 1);
    const RowsOfExpert own(groups, rows, expert);
    const int mine = first + lane < groups.experts ? own.shares(kOfShare) : 0;
    int until = mine;  // shares of the lanes up to this one
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int others = __shfl_up_sync(0xffffffff, until, distance);
      if (lane >= distance) until += others;
    }
    const int number = wanted - (before + until - mine);
    if (0 <= number && number < mine) {
      const int begin = own.begin + number * kOfShare;
      found = {int(expert), begin, ::min(kOfShare, own.end - begin), nullptr};
    }
    before += __shfl_sync(0xffffffff, until, kWarp - 1);
  }
}

// Zeros in the rows behind the last offset: in the columns of a cluster, in every so manieth row.
template <class T>
__device__ inline void clear_rows_of_nobody(const FewRows& call, const RowGroups& groups,
                                            int64_t column, int columns, int first, int step) {
  const int count = int(::min(int64_t(columns), call.columns - column));
  first += RowsOfExpert::within(groups.offsets[groups.experts - 1], int(call.rows));
  for (int row = first; row < call.rows; row += step) {
    T* const out = call.out.even_row<T>(row).address + column;
    for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) out[i] = narrow<T>(0.0f);
  }
}

// What a block works on; no rows if nothing. `cluster` becomes the number of its cluster among
// those of its share. All threads call it.
template <class T, int kOfShare, class Call>
__device__ Share share_of_block(const Call& call, const Geometry& geometry, unsigned& cluster) {
  __shared__ Share found;
  __shared__ int tokens[kOfShare];
  const RowGroups& groups = call.groups;
  const int wanted = int(cluster / unsigned(geometry.of_share));
  cluster -= unsigned(wanted * geometry.of_share);
  const int thread = int(threadIdx.x), threads = int(blockDim.x), rows = int(call.rows);
  if (thread == 0) found = {0, 0, 0, nullptr};
  if (thread < kOfShare) tokens[thread] = 0;
  wait_for_previous();
  const bool gathers = groups.slots != nullptr;
  int64_t slot =
      gathers && thread < rows ? groups.slots[thread] : -1;  // asked for before it is needed
  if (thread < kWarp) {
    __syncwarp();
    find_share<kOfShare>(groups, rows, wanted, found);
  }
  __syncthreads();
  Share share = found;
  if (gathers) {
    for (int i = thread; i < rows; i += threads) {
      if (i != thread) slot = groups.slots[i];
      const int64_t own = slot - share.first;
      if (0 <= own && own < share.rows) tokens[own] = i / int(groups.choices);
    }
    share.tokens = tokens;
    __syncthreads();
  }
  const int columns = geometry.rows() / (call.gated ? 2 : 1);
  const int shares = int(gridDim.x) / (geometry.of_share * geometry.cluster);
  clear_rows_of_nobody<T>(call, groups, int64_t(cluster) * columns, columns, wanted, shares);
  return share;
}

// Calls body with the number of groups of 8 rows of a share: as many as an expert usually has,
// twice.
template <class Body>
void with_row_groups(const RowGroups& groups, int64_t rows, const Body& body) {
  const int64_t experts = std::min(groups.experts, rows);
  if (rows <= 4 * experts) return body(std::integral_constant<int, 1>{});
  body(std::integral_constant<int, 2>{});
}

}  // namespace dsx::cuda
