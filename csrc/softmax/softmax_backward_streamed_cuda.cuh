// The gradient of softmax of rows that come into shared memory by the copy engine: long ones, of
// scores without a cap, all of which take part. A block, or a cluster of blocks that have a part of
// a row each, takes one row after the other.
#pragma once

#include "common/cuda/streamed_rows.cuh"
#include "softmax/softmax.h"
#include "softmax/twice_read_cuda.cuh"

namespace dsx {

#include "common/softmax_math.inl"

namespace {

constexpr const char* kBackwardOp = "softmax_backward";

// As those of rows that are read twice.
using LongTeam = cuda::LoopingTeam<cuda::RowLength::is_long, 2>;

template <bool kParts>
__global__ void __launch_bounds__(cuda::kPartThreads, 3)
    streamed_backward_kernel(const __grid_constant__ SoftmaxBackward softmax, int part,
                             int blocks) {
  using T = BFloat16;
  using cuda::RowFloats;
  extern __shared__ __align__(128) uint4 row_memory[];
  __shared__ cuda::Barrier arrived;
  __shared__ float of_parts[kParts ? cuda::PartExchange::kFloats : 1];
  const int64_t first = kParts ? int64_t(cuda::rank_in_cluster()) * part : 0;
  const int count = int(::min(int64_t(part), softmax.length - first));
  cuda::StreamedRow<T, 2> row{reinterpret_cast<T*>(row_memory), &arrived, first, count,
                              cuda::read_once()};
  cuda::PartExchange exchange{blocks, of_parts};
  const int64_t step = gridDim.x / unsigned(blocks);
  const auto ask = [&](int64_t number) {
    if (threadIdx.x > 0 || number >= softmax.rows) return;
    row.ask({softmax.out.row<T>(number), softmax.grad_out.row<T>(number)});
  };
  row.begin();
  ask(blockIdx.x / unsigned(blocks));
  cuda::cluster_barrier(blocks);
  const RowFloats scale = softmax.scores.scale;
  int turn = 0;
#pragma unroll 1
  for (int64_t number = blockIdx.x / unsigned(blocks); number < softmax.rows; number += step) {
    const Pointer<T> grad_x = softmax.grad_x.row<T>(number);
    row.wait();
    float dots[1] = {};
    row.for_each_vector([&](int i) {
      dots[0] += cuda::sum_of_lanes(grad_term(row.vector(0, i), row.vector(1, i)));
    });
    cuda::add_over_team<LongTeam>(dots, turn++);
    if constexpr (kParts) {
      const float* of_all = exchange.gather(dots);
      dots[0] = 0;
      for (int p = 0; p < blocks; ++p) dots[0] += of_all[p * cuda::PartExchange::kMostSums];
    }
    row.for_each_vector([&](int i) {
      const RowFloats result =
          grad_of_score(row.vector(0, i), row.vector(1, i), RowFloats(dots[0])) * scale;
      cuda::put<cuda::Stored::streamed>(grad_x, first + i, cuda::kRowVector, true, result);
    });
    __syncthreads();
    ask(number + step);
  }
}

// Whether there was a kernel for it. Rows are bfloat16: of float32 too few fit into shared memory,
// and those of float16 are rare.
inline bool run_streamed(const SoftmaxBackward& softmax, cudaStream_t queue) {
  const auto run = [&](auto kernel) {
    const auto stream =
        cuda::stream_of<BFloat16, 2>(kernel, softmax.rows, softmax.length, kBackwardOp);
    if (!stream) return false;
    cuda::launch_kernel(kernel, stream->launch, queue, kBackwardOp, softmax, stream->part,
                        stream->launch.cluster);
    return true;
  };
  if (cuda::parts_of(softmax.length) > 1) return run(streamed_backward_kernel<true>);
  return run(streamed_backward_kernel<false>);
}

}  // namespace
}  // namespace dsx
