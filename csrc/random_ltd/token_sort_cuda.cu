// token_sort_ on CUDA: a block has a row, and counts how often each token is in it.
#include "random_ltd/token_sort.h"

#include <algorithm>
#include <climits>

#include "common/cuda/check.h"

namespace dsx {
namespace {

constexpr int kThreads = 256;
constexpr int kOfThread = int(kSortedTogether) / kThreads;  // counters, one after the other

// Counters in shared memory; those of different threads are in different banks.
struct Counters {
  int32_t counts[kSortedTogether + kThreads];
  int32_t of_warps[kThreads / 32];

  __device__ static int place_of(int i) { return i + i / kOfThread; }
  __device__ int32_t& at(int i) { return counts[place_of(i)]; }
};

// How many ids are before the counters of this thread, and `total` how many there are at all. All
// threads of the block call it.
__device__ int32_t ids_before(Counters& counters, int32_t& total) {
  const int thread = int(threadIdx.x), lane = thread % 32;
  int32_t mine = 0;
  for (int i = 0; i < kOfThread; ++i) mine += counters.at(thread * kOfThread + i);
  int32_t until = mine;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t others = __shfl_up_sync(0xffffffff, until, distance);
    if (lane >= distance) until += others;
  }
  if (lane == 31) counters.of_warps[thread / 32] = until;
  __syncthreads();
  int32_t before = until - mine;
  total = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    if (warp < thread / 32) before += counters.of_warps[warp];
    total += counters.of_warps[warp];
  }
  return before;
}

__device__ void sort_row(const TokenSort& call, const int32_t* given, int32_t* sorted,
                         Counters& counters) {
  int64_t done = 0;
  for (int64_t base = 0; base <= call.tokens; base += kSortedTogether) {
    for (int i = int(threadIdx.x); i < kSortedTogether; i += kThreads) counters.at(i) = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < call.kept; i += kThreads) {
      const int64_t id = given[i];
      const int64_t counted = uint64_t(id) < uint64_t(call.tokens) ? id : call.tokens;
      const int64_t place = counted - base;
      if (uint64_t(place) < uint64_t(kSortedTogether)) atomicAdd(&counters.at(int(place)), 1);
    }
    __syncthreads();
    int32_t total;
    int64_t at = done + ids_before(counters, total);
    for (int i = int(threadIdx.x) * kOfThread; i < (int(threadIdx.x) + 1) * kOfThread; ++i) {
      const int64_t end = at + counters.at(i);
      for (; at < end; ++at) sorted[at] = int32_t(base + i);
    }
    done += total;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads) sort_kernel(const __grid_constant__ TokenSort call) {
  __shared__ Counters counters;
  for (int64_t row = blockIdx.x; row < call.rows; row += gridDim.x) {
    int32_t* const ids = call.ids + row * call.kept;
    const int32_t* given = ids;
    if (call.before != nullptr) {
      int32_t* const before = call.before + row * call.kept;
      for (int64_t i = threadIdx.x; i < call.kept; i += kThreads) before[i] = ids[i];
      given = before;
      __syncthreads();
    }
    sort_row(call, given, ids, counters);
  }
}

}  // namespace

void token_sort_cuda(const TokenSort& call, void* stream) {
  constexpr const char* op = "token_sort_";
  if (call.rows == 0 || call.kept == 0) return;
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  const unsigned blocks = unsigned(std::min<int64_t>(call.rows, INT_MAX));
  sort_kernel<<<blocks, kThreads, 0, cudaStream_t(stream)>>>(call);
  cuda::check(cudaGetLastError(), op);
}

}  // namespace dsx
