// moe_assign of a few choices on CUDA, by one block, for kernels that have more to do, too.
#pragma once

#include "moe/assign.h"

namespace dsx::cuda {

// What a block has near for it.
struct AssignShared {
  static constexpr int kMost = int(kMostExperts);
  // Of choices, in the order in which they take room; -1: none.
  alignas(16) int16_t experts[kMostFewChoices];
  int counts[kMost], first_counts[kMost], ends[kMost];
  int of_warps[32];
};

// Which choice takes room as number `i`: first ones of all tokens before second ones.
__device__ inline int64_t few_choice(const Assign& call, const TokenOrder& order, int i) {
  const int tokens = int(call.tokens), choice = i / tokens, place = i - choice * tokens;
  return (call.seed == nullptr ? place : order.token_at(place)) * call.k + choice;
}

// Replaces the counts of experts by where the rows of each end; a thread has some experts.
__device__ inline void find_ends(const Assign& call, AssignShared& shared) {
  const int thread = int(threadIdx.x), threads = int(blockDim.x), lane = thread % 32;
  const int experts = int(call.num_experts), each = (experts + threads - 1) / threads;
  const int first = ::min(thread * each, experts), end = ::min(first + each, experts);
  const auto kept = [&](int e) { return int(::min(int64_t(shared.counts[e]), call.capacity)); };
  int mine = 0;
  for (int e = first; e < end; ++e) mine += kept(e);
  int until = mine;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int others = __shfl_up_sync(0xffffffff, until, distance);
    if (lane >= distance) until += others;
  }
  if (lane == 31) shared.of_warps[thread / 32] = until;
  __syncthreads();
  int row = until - mine;
  for (int warp = 0; warp < thread / 32; ++warp) row += shared.of_warps[warp];
  for (int e = first; e < end; ++e) {
    row += kept(e);
    shared.ends[e] = row;
    call.offsets[e] = row;
    call.counts[e] = shared.counts[e];
    call.first_counts[e] = shared.first_counts[e];
  }
}

// How many of the choices before number i are of that expert: eight are read at a time.
__device__ inline int choices_before(const int16_t* experts, int i, int expert) {
  constexpr int kTogether = 8, kBits = 16;  // a choice of the expert sets so many
  const uint32_t two = uint32_t(expert) * 0x10001u;
  int bits = 0, j = 0;
#pragma unroll 4  // loads in flight
  for (; j + kTogether <= i; j += kTogether) {
    const uint4 eight = *reinterpret_cast<const uint4*>(experts + j);
    bits += __popc(__vcmpeq2(eight.x, two)) + __popc(__vcmpeq2(eight.y, two)) +
            __popc(__vcmpeq2(eight.z, two)) + __popc(__vcmpeq2(eight.w, two));
  }
  int count = bits / kBits;
#pragma unroll
  for (int last = 0; last < kTogether - 1; ++last) {
    const bool is_one = experts[j + last] == expert;
    count += j + last < i && is_one;
  }
  return count;
}

// Does what assign_cuda does. All threads of the block call it, which are whole warps.
__device__ inline void assign_in_block(const Assign& call, AssignShared& shared) {
  const int thread = int(threadIdx.x), threads = int(blockDim.x);
  const int experts = int(call.num_experts), choices = int(call.tokens * call.k);
  for (int e = thread; e < experts; e += threads) shared.counts[e] = shared.first_counts[e] = 0;
  __syncthreads();
  const TokenOrder order(call.tokens, call.seed == nullptr ? 0 : *call.seed);
  for (int i = thread; i < choices; i += threads) {
    const int64_t expert = call.experts[few_choice(call, order, i)];
    const bool is_one = uint64_t(expert) < uint64_t(experts);
    shared.experts[i] = is_one ? int16_t(expert) : int16_t(-1);
    if (!is_one) continue;
    atomicAdd(&shared.counts[expert], 1);
    if (i < call.tokens) atomicAdd(&shared.first_counts[expert], 1);
  }
  __syncthreads();
  find_ends(call, shared);
  __syncthreads();
  for (int i = thread; i < choices; i += threads) {
    const int expert = shared.experts[i];
    int64_t row = -1;
    if (expert >= 0) {
      const int before = choices_before(shared.experts, i, expert);
      const int kept = int(::min(int64_t(shared.counts[expert]), call.capacity));
      if (before < kept) row = shared.ends[expert] - kept + before;
    }
    call.slots[few_choice(call, order, i)] = row;
  }
}

}  // namespace dsx::cuda
