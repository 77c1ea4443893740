// What rows add to the gradients of vectors where the blocks that have the rows do not add it up:
// where a row is not held, and where partial sums would be much beside few rows.
#pragma once

#include "norm/norm_cuda.cuh"

namespace dsx {
namespace cuda {

constexpr int kWarpsOfColumns = 16, kColumnsOfBlock = kWarp * kRowVector;

// Each warp takes every so many-th row of one group, each lane eight columns.
template <class Kind, class T>
__global__ void __launch_bounds__(kWarpsOfColumns* kWarp)
    columns_kernel(const __grid_constant__ NormBackward norm,
                   const RowMoments<Kind>* of_rows,  // [rows]
                   int64_t rows_of_group,
                   OfVectors<float*> partials,  // [groups, length] written; all null: there is one
                   const __grid_constant__ OfVectors<Rows> grads,  // written then
                   bool is_aligned) {
  __shared__ float of_warps[kWarpsOfColumns][kColumnsOfBlock];
  const bool aligned = !std::is_same_v<T, Any> || is_aligned;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int64_t column = int64_t(blockIdx.x) * kColumnsOfBlock, i = column + lane * kRowVector;
  const int count = int(::min(int64_t(kRowVector), norm.length - i));
  RowFloats of_weight(0.0f), of_bias(0.0f), of_x_bias(0.0f);
  if (count > 0) {
    const auto fetch_from = [&](const Rows& rows, int64_t row) {
      return fetch(rows.row<T>(row), i, count, aligned);
    };
    RowFloats weight(1.0f);
    if (norm.weight.is_present()) {
      weight = with_offset(floats_of(fetch(norm.weight.even_row<Any>(0), i, count, is_aligned)),
                           norm.weight_offset);
    }
    const int64_t end = ::min((blockIdx.y + int64_t(1)) * rows_of_group, norm.rows);
#pragma unroll 4
    for (int64_t row = blockIdx.y * rows_of_group + warp; row < end; row += kWarpsOfColumns) {
      const RowMoments<Kind> found = of_rows[row];
      const RowVector<T> x = fetch_from(norm.x, row), grad_out = fetch_from(norm.grad_out, row);
      const RowFloats grad = floats_of(grad_out);
      const RowFloats value = found.standardized_of(floats_of(x));
      of_weight = add_grad_of_weight(value, grad, of_weight);
      of_bias = of_bias + grad;
      if (!grads.x_bias.is_present()) continue;
      of_x_bias = of_x_bias + found.gradient(value, grad, weight);
      if (norm.grad_sum.is_present())
        of_x_bias = of_x_bias + floats_of(fetch_from(norm.grad_sum, row));
    }
  }
  const auto store = [&](const RowFloats& sum, float* partial, const Rows& grad) {
    if (!grad.is_present()) return;
    __syncthreads();  // the last readers of that memory
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) of_warps[warp][lane * kRowVector + k] = sum.lanes[k];
    __syncthreads();
    const int64_t mine = column + threadIdx.x;
    if (int(threadIdx.x) >= kColumnsOfBlock || mine >= norm.length) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarpsOfColumns; ++w) total += of_warps[w][threadIdx.x];
    if (partial != nullptr) {
      partial[blockIdx.y * norm.length + mine] = total;
    } else {
      cuda::store<Access::single>(grad.row<Any>(0) + mine, Floats<1>(total), 1);
    }
  };
  store(of_weight, partials.weight, grads.weight);
  store(of_bias, partials.bias, grads.bias);
  store(of_x_bias, partials.x_bias, grads.x_bias);
}

// Groups are large enough for their sums to be little beside the rows.
struct ColumnsGrid {
  int64_t blocks, groups, rows_of_group;

  ColumnsGrid(int64_t rows, int64_t length)
      : blocks(ceil_div(length, kColumnsOfBlock)),
        rows_of_group(std::max<int64_t>(1024, ceil_div(rows, 65535))) {
    groups = std::max<int64_t>(1, ceil_div(rows, rows_of_group));
  }
};

// Queues it. `whole`: rows can be accessed as vectors of the dtype of x.
template <class Kind>
void add_columns(const NormBackward& norm, const RowMoments<Kind>* of_rows,
                 const OfVectors<float*>& partials, const OfVectors<Rows>& grads, bool whole,
                 bool aligned, const char* op, cudaStream_t stream) {
  const ColumnsGrid grid(norm.rows, norm.length);
  const auto launch = [&](auto storage) {
    columns_kernel<Kind, decltype(storage)>
        <<<dim3(unsigned(grid.blocks), unsigned(grid.groups)), kWarpsOfColumns * kWarp, 0,
           stream>>>(norm, of_rows, grid.rows_of_group, partials, grads, aligned);
  };
  if (whole) {
    with_storage_type(norm.x.dtype, launch);
  } else {
    launch(Any{});
  }
  check(cudaGetLastError(), op);
}

}  // namespace cuda
}  // namespace dsx
