// What the kernels of block_sparse_attention on CUDA know of a call: lists of what a layout names,
// made by the device, and scores with all that is added to them or leaves them out.
#pragma once

#include "common/cuda/convert.cuh"
#include "attention/sparse/block_sparse.h"

namespace dsx::cuda {

constexpr const char* kSparseName = "block_sparse_attention";

// Tokens of a tile that has a list; at least a block. Few blocks have one list together: what they
// name differs, and all that one of them names is fetched.
inline int tile_tokens(int block) { return block == 16 ? 64 : block; }

// The blocks that some block of a tile names, in rising order: their number, and in the lowest 8
// bits which blocks of the tile name it.
struct TileList {
  const uint32_t* entries;
  int count;
};

// Of all tiles of rows, or of columns.
struct TileLists {
  int32_t* counts;    // [heads or 1, tiles]
  uint32_t* entries;  // [heads or 1, tiles, blocks]
  int tiles, blocks;
  bool of_heads;

  __device__ TileList of(int head, int tile) const {
    const int64_t number = int64_t(of_heads ? head : 0) * tiles + tile;
    return {entries + number * blocks, counts[number]};
  }
};

// What makes weights of a row's products, and gradients of scores.
struct RowNumbers {
  float shift;  // log2(e) times the logarithm of the sum; inf where nothing is seen
  float delta;
};

struct SparseTask {
  BlockSparse call;
  TileLists lists;
  HeadTokens grad_out, grad_q, grad_k, grad_v;  // of backward
  RowNumbers* numbers;                          // [batch, heads, tokens]
  // [batch, heads, strips of 16 tokens]: a bit for each token whose result is not finite. Tensor
  // cores write it, and what it says is done again in float32.
  uint32_t* spoiled;
  int tile;  // tokens
};

constexpr float kLog2E = 1.44269504f;

__device__ inline float zero_if_none(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

__device__ inline float mask_number(const ScoreMask& mask, int64_t place) {
  if (mask.kind == ScoreMask::Kind::takes_part) {
    return static_cast<const uint8_t*>(mask.data)[place] != 0 ? 0.0f : -INFINITY;
  }
  switch (mask.dtype) {
    case Dtype::bfloat16: return widen(static_cast<const BFloat16*>(mask.data)[place]);
    case Dtype::float16: return widen(static_cast<const Half*>(mask.data)[place]);
    default: return static_cast<const float*>(mask.data)[place];
  }
}

// What all masks together add to a score. Not inlined: kernels look at many scores.
static __device__ __noinline__ float masks_at(const BlockSparse* call, int batch, int head, int row,
                                              int key) {
  float added = 0;
#pragma unroll 1
  for (int m = 0; m < call->masks; ++m) {
    const ScoreMask& mask = call->mask[m];
    const float number = mask_number(
        mask, batch * mask.of_batch + head * mask.of_head + row * mask.of_row + key * mask.of_key);
    if (number == -INFINITY) return number;
    added += number;
  }
  return added;
}

// A score from the product of a row and a key, times `factor`; -inf: it is left out. Without
// kMasks, there are none.
template <bool kMasks = true>
__device__ inline float score_of(const BlockSparse& call, int batch, int head, int row, int key,
                                 float product, float factor) {
  if (row >= call.tokens || key >= call.tokens || (call.causal && key > row)) return -INFINITY;
  const float score = product * factor;
  if (!kMasks || call.masks == 0) return score;
  const float added = masks_at(&call, batch, head, row, key);
  return added == -INFINITY ? added : score + added;
}

// Lists, for tiles of `group` blocks each; blocks of threads are [tiles, heads or 1].
struct ListsTask {
  LayoutView layout;  // rows and columns changed for each other, if lists are of columns
  TileLists lists;
  int group;
  bool causal, of_rows;
};

constexpr int kListThreads = 256;

template <class T>
__global__ void __launch_bounds__(kListThreads) lists_kernel(const ListsTask task) {
  __shared__ int of_warps[kListThreads / 32];
  const int tile = blockIdx.x, head = blockIdx.y, n = task.lists.blocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t number = int64_t(head) * task.lists.tiles + tile;
  const T* const layout = static_cast<const T*>(task.layout.data) + head * task.layout.of_head;
  uint32_t* const entries = task.lists.entries + number * n;
  int count = 0;
  for (int first = 0; first < n; first += kListThreads) {
    const int other = first + threadIdx.x;
    uint32_t names = 0;
    for (int i = 0; i < task.group && other < n; ++i) {
      const int line = tile * task.group + i;
      if (line >= n || (task.causal && (task.of_rows ? other > line : line > other))) continue;
      const T here = layout[line * task.layout.of_row + other * task.layout.of_column];
      names |= uint32_t(here != 0) << i;
    }
    const unsigned ballot = __ballot_sync(0xffffffff, names != 0);
    if (lane == 0) of_warps[warp] = __popc(ballot);
    __syncthreads();
    int place = count + __popc(ballot & ((1u << lane) - 1));
    for (int i = 0; i < kListThreads / 32; ++i) {
      if (i < warp) place += of_warps[i];
      count += of_warps[i];
    }
    if (names != 0) entries[place] = uint32_t(other) << 8 | names;
    __syncthreads();
  }
  if (threadIdx.x == 0) task.lists.counts[number] = count;
}

__device__ inline float element_of(const Pointer<Any>& row, int64_t i) {
  switch (row.dtype) {
    case Dtype::bfloat16: return widen(static_cast<const BFloat16*>(row.address)[i]);
    case Dtype::float16: return widen(static_cast<const Half*>(row.address)[i]);
    default: return static_cast<const float*>(row.address)[i];
  }
}

}  // namespace dsx::cuda
