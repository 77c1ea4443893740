// moe_assign on CUDA: counts of each tile, their sums over the tiles before, and the places within
// a tile. All of it is whole numbers, so that no order of additions shows.
#include "moe/assign.h"

#include <algorithm>

#include "common/cuda/chain.cuh"
#include "moe/assign_in_block_cuda.cuh"

namespace dsx {

namespace {

constexpr int kLanes = 32, kThreads = 256, kWarps = kThreads / kLanes;
constexpr const char* kOp = "moe_assign";

// The tile of a block: places [first, end) of the tokens, of one choice.
struct Tile {
  int64_t first, end, choice;

  __device__ Tile(const Assign& call, const AssignTiles& tiles)
      : first(blockIdx.x % tiles.of_choice * tiles.places),
        end(::min(first + tiles.places, call.tokens)),
        choice(blockIdx.x / tiles.of_choice) {}
};

// Finds the choices of tokens by their places.
class Choices {
 public:
  __device__ explicit Choices(const Assign& call)
      : call_(call), order_(call.tokens, call.seed == nullptr ? 0 : *call.seed) {}

  __device__ int64_t index_of(int64_t place, int64_t choice) const {
    return (call_.seed == nullptr ? place : order_.token_at(place)) * call_.k + choice;
  }
  // -1: none.
  __device__ int expert_of(int64_t index) const {
    const int64_t expert = call_.experts[index];
    return uint64_t(expert) < uint64_t(call_.num_experts) ? int(expert) : -1;
  }

 private:
  const Assign& call_;
  const TokenOrder order_;
};

__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ Assign call, const __grid_constant__ AssignTiles tiles) {
  extern __shared__ __align__(16) int counts[];  // [num_experts]
  const int experts = int(call.num_experts);
  for (int e = int(threadIdx.x); e < experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  const Tile tile(call, tiles);
  const Choices choices(call);
  for (int64_t place = tile.first + threadIdx.x; place < tile.end; place += kThreads) {
    const int expert = choices.expert_of(choices.index_of(place, tile.choice));
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  for (int e = int(threadIdx.x); e < experts; e += kThreads) {
    call.of_tiles[int64_t(blockIdx.x) * experts + e] = counts[e];
  }
}

constexpr int kColumnThreads = 32;

// In the place of each tile's counts, those of all tiles before it; and the counts of all. A block
// has 32 experts, and each of its warps as many tiles as the others.
__global__ void __launch_bounds__(kLanes* kColumnThreads)
    scan_kernel(const __grid_constant__ Assign call, const __grid_constant__ AssignTiles tiles) {
  __shared__ int of_threads[kColumnThreads][kLanes];
  const int lane = int(threadIdx.x) % kLanes, thread = int(threadIdx.x) / kLanes;
  const int64_t experts = call.num_experts, expert = int64_t(blockIdx.x) * kLanes + lane;
  const int64_t count = tiles.of_choice * call.k, of_thread = ceil_div(count, kColumnThreads);
  const int64_t first = thread * of_thread;
  const int64_t end = expert < experts ? ::min(first + of_thread, count) : first;
  int32_t* const column = call.of_tiles + expert;
  int sum = 0;
#pragma unroll 4  // loads in flight
  for (int64_t tile = first; tile < end; ++tile) sum += column[tile * experts];
  of_threads[thread][lane] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int i = 0; i < kColumnThreads; ++i) {
    before += i < thread ? of_threads[i][lane] : 0;
    all += of_threads[i][lane];
  }
  const bool has_others = call.k > 1 && count > 0;
  for (int64_t tile = first; tile < end; ++tile) {
    const int here = column[tile * experts];
    if (has_others && tile == tiles.of_choice) call.first_counts[expert] = before;
    column[tile * experts] = before;
    before += here;
  }
  if (thread > 0 || expert >= experts) return;
  call.counts[expert] = all;
  if (!has_others) call.first_counts[expert] = all;
}

// The sum of what the threads before have, for each thread.
__device__ int sum_before(int mine) {
  __shared__ int of_threads[kThreads];
  of_threads[threadIdx.x] = mine;
  for (int distance = 1; distance < kThreads; distance *= 2) {
    __syncthreads();
    const int before = int(threadIdx.x) >= distance ? of_threads[threadIdx.x - distance] : 0;
    __syncthreads();
    of_threads[threadIdx.x] += before;
  }
  return of_threads[threadIdx.x] - mine;
}

// Where the rows of each expert begin and end.
__device__ void find_rows(const Assign& call, int* begins, int* ends) {
  const int experts = int(call.num_experts), per_thread = int(ceil_div(experts, kThreads));
  const int first = int(threadIdx.x) * per_thread, end = ::min(first + per_thread, experts);
  const auto kept = [&](int e) { return int(::min(call.counts[e], call.capacity)); };
  int mine = 0;
  for (int e = first; e < end; ++e) mine += kept(e);
  int row = sum_before(mine);
  for (int e = first; e < end; ++e) {
    begins[e] = row;
    row += kept(e);
    ends[e] = row;
    if (blockIdx.x == 0) call.offsets[e] = row;
  }
}

__global__ void __launch_bounds__(kThreads)
    place_kernel(const __grid_constant__ Assign call, const __grid_constant__ AssignTiles tiles) {
  extern __shared__ __align__(16) int shared[];
  const int experts = int(call.num_experts), warp = int(threadIdx.x) / kLanes;
  int *begins = shared, *ends = shared + experts, *next = shared + 2 * experts;
  for (int i = int(threadIdx.x); i < kWarps * experts; i += kThreads) next[i] = 0;
  find_rows(call, begins, ends);
  __syncthreads();
  if (tiles.of_choice * call.k == 0) return;  // no choices
  const Tile tile(call, tiles);
  const Choices choices(call);
  const int lane = int(threadIdx.x) % kLanes;
  const int64_t of_warp = ceil_div(ceil_div(tiles.places, kWarps), kLanes) * kLanes;
  const int64_t first = ::min(tile.first + warp * of_warp, tile.end);
  const int64_t end = ::min(first + of_warp, tile.end);
  for (int64_t place = first + lane; place < end; place += kLanes) {
    const int expert = choices.expert_of(choices.index_of(place, tile.choice));
    if (expert >= 0) atomicAdd(&next[warp * experts + expert], 1);
  }
  __syncthreads();
  for (int e = int(threadIdx.x); e < experts; e += kThreads) {
    int row = begins[e] + call.of_tiles[int64_t(blockIdx.x) * experts + e];
    for (int w = 0; w < kWarps; ++w) {
      const int here = next[w * experts + e];
      next[w * experts + e] = row;
      row += here;
    }
  }
  __syncthreads();
  int* const rows = next + warp * experts;
  for (int64_t start = first; start < end; start += kLanes) {
    const int64_t place = start + lane;
    const bool is_there = place < end;
    const int64_t index = is_there ? choices.index_of(place, tile.choice) : 0;
    const int expert = is_there ? choices.expert_of(index) : -1;
    const unsigned same = __match_any_sync(0xffffffff, expert);
    const int rank = __popc(same & ((1u << lane) - 1));
    const int row = expert >= 0 ? rows[expert] + rank : 0;
    __syncwarp();
    if (expert >= 0 && rank == 0) rows[expert] += __popc(same);
    __syncwarp();
    if (is_there) call.slots[index] = expert >= 0 && row < ends[expert] ? row : -1;
  }
}

__global__ void __launch_bounds__(kThreads) assign_few_kernel(const __grid_constant__ Assign call) {
  __shared__ cuda::AssignShared shared;
  cuda::let_next_begin();
  cuda::wait_for_previous();
  cuda::assign_in_block(call, shared);
}

}  // namespace

void assign_cuda(const Assign& call, void* stream) {
  if (are_few(call)) {
    const cuda::Launch how{1, kThreads, 0, 1, cuda::can_chain(assign_few_kernel, kOp)};
    return cuda::launch_kernel(assign_few_kernel, how, cudaStream_t(stream), kOp, call);
  }
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  const AssignTiles tiles(call.tokens, call.k);
  const unsigned blocks = unsigned(tiles.of_choice * call.k);
  const size_t bytes = size_t(call.num_experts) * sizeof(int);
  if (blocks > 0) {
    count_kernel<<<blocks, kThreads, bytes, cudaStream_t(stream)>>>(call, tiles);
    cuda::check(cudaGetLastError(), kOp);
  }
  scan_kernel<<<unsigned(ceil_div(call.num_experts, kLanes)), kLanes * kColumnThreads, 0,
                cudaStream_t(stream)>>>(call, tiles);
  cuda::check(cudaGetLastError(), kOp);
  place_kernel<<<std::max(blocks, 1u), kThreads, bytes * (2 + kWarps), cudaStream_t(stream)>>>(
      call, tiles);
  cuda::check(cudaGetLastError(), kOp);
}

}  // namespace dsx
