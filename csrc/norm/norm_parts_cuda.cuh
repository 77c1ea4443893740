// Teams of which each has a part of a row.
#pragma once

#include "common/cuda/row_parts.cuh"
#include "norm/norm_cuda.cuh"

namespace dsx::cuda {

// The threads of a block that take a part of a row, those of its cluster the row. Sums of parts are
// added in their order.
struct PartTeam : RowTeam<RowLength::is_usual> {
  static constexpr bool kParts = true;
  mutable PartExchange exchange;

  __device__ PartTeam(int blocks, float* of_parts)
      : RowTeam(int(blockDim.x)), exchange{blocks, of_parts} {}

  __device__ int64_t row() const { return blockIdx.x / unsigned(exchange.blocks); }

  template <int kSums>
  __device__ void add_over_parts(float (&sums)[kSums]) const {
    const float* all = exchange.gather(sums);
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      sums[s] = all[s];
      for (int part = 1; part < exchange.blocks; ++part) {
        sums[s] += all[part * PartExchange::kMostSums + s];
      }
    }
  }
};

}  // namespace dsx::cuda
