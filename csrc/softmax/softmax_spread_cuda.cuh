// softmax of long rows whose team is spread over the blocks of a cluster: each block has some of
// its warps, and their part of the row in shared memory. So a row is read once, a multiprocessor
// has several on the way, and the bits are those of one block that reads it twice.
#pragma once

#include "common/cuda/fetch.cuh"
#include "softmax/softmax_cuda.cuh"

namespace dsx {
namespace {

// What a block may have of a row. More makes clusters smaller, and fewer of them fit.
constexpr int64_t kSpreadBytes = 32 << 10;
constexpr int kMostSpreadBlocks = 8;

// The team of a row that is read twice, in loops; those of no more elements are not spread.
using SpreadTeam = cuda::LoopingTeam<cuda::RowLength::is_long, 4>;
constexpr int64_t kLeastToSpread = 32768;

__global__ void __launch_bounds__(SpreadTeam::kMostThreads / 2)
    spread_softmax_kernel(const __grid_constant__ Softmax softmax, int blocks) {
  using T = BFloat16;
  using Vector = cuda::RowVector<T>;
  extern __shared__ __align__(16) uint4 row_memory[];
  __shared__ float2 of_warps[cuda::kWarp];
  const int64_t row = blockIdx.x / unsigned(blocks);
  const int length = int(softmax.length),
            thread = int(cuda::rank_in_cluster() * blockDim.x + threadIdx.x);
  const Pointer<T> x = softmax.x.row<T>(row), out = softmax.out.row<T>(row);
  const RowScores<T, true> scores(softmax.scores, row, Keys{0, softmax.length});
  Vector* const mine = reinterpret_cast<Vector*>(row_memory) + threadIdx.x;
  const auto column = [&](int v) { return (v * SpreadTeam::kMostThreads + thread) * kRowVector; };
  for (int v = 0; column(v) < length; ++v) {
    cuda::fetch_bytes<int(sizeof(Vector))>(mine + v * blockDim.x, x.address + column(v));
  }
  cuda::end_fetches();
  // Calls body(score, i) for each vector of this thread, from element i on. A few are read at once.
  const auto for_each_score = [&](const auto& body) {
    constexpr int kBatch = SpreadTeam::kVectors;
#pragma unroll 1
    for (int first = 0; column(first) < length; first += kBatch) {
      Vector vectors[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (column(first + k) < length) vectors[k] = mine[(first + k) * blockDim.x];
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = column(first + k);
        if (i < length) body(scores.of(floats_of(vectors[k]), i, kRowVector), i);
      }
    }
  };
  cuda::cluster_barrier_after_reading(blocks);  // all are there, before the first sums
  cuda::wait_for_fetches<0>();
  cuda::RowPowers all;
  for_each_score([&](const RowFloats& score, int) { all.add(score); });
  all.add_over_cluster(blocks, of_warps);
  const RowFloats inverse = inverse_of(Floats<1>(all.sum)).lanes[0];
  const bool is_finite = inverse.lanes[0] >= 0;  // otherwise a score is NaN or inf
  const RowFloats shift = cuda::RowPowers::shift(all.largest);
  for_each_score([&](const RowFloats& score, int i) {
    const RowFloats result = is_finite
                                 ? exp_of_negative(score - shift) * inverse
                                 : select(score == RowFloats(-INFINITY), RowFloats(0.0f), inverse);
    cuda::put<cuda::Stored::streamed>(out, i, kRowVector, true, result);
  });
}

// Whether there was a kernel for it. Rows are whole, and all keys take part. Those of float32 do
// not fit, and those of float16 are rare.
inline bool run_spread(const Softmax& softmax, cudaStream_t queue) {
  if (softmax.x.dtype != Dtype::bfloat16 || softmax.length <= kLeastToSpread) return false;
  const int64_t of_vectors = SpreadTeam::kMostThreads * kRowVector * int64_t(sizeof(BFloat16));
  const int64_t bytes =
      ceil_div(softmax.length * int64_t(sizeof(BFloat16)), of_vectors) * of_vectors;
  int blocks = 2;
  while (bytes > blocks * kSpreadBytes) blocks *= 2;
  if (blocks > kMostSpreadBlocks || !cuda::can_chain(spread_softmax_kernel, "softmax"))
    return false;
  cuda::launch_kernel(spread_softmax_kernel,
                      {unsigned(softmax.rows * blocks), SpreadTeam::kMostThreads / blocks,
                       bytes / blocks, blocks, false},
                      queue, "softmax", softmax, blocks);
  return true;
}

}  // namespace
}  // namespace dsx
