// bias_activation on CUDA. When the gradient of the bias is wanted, a block takes a few columns of
// a group of rows, and adds it up over those; a small kernel then adds the groups.
#include "elementwise/bias_activation.h"

#include "common/cuda/add_partials.cuh"
#include "elementwise/row_list_cuda.cuh"

namespace dsx {

#include "common/activation_math.inl"

namespace {

using cuda::Floats;
using cuda::kCount;
using cuda::kThreads;
using cuda::kVectors;
using cuda::kWarp;
using cuda::Place;
using cuda::Vector;

constexpr const char* kOp = "bias_activation";
constexpr const char* kBackwardOp = "bias_activation_backward";

// `count` elements of the bias, from number i on, or zeros. It is in the cache after the first row.
template <class T>
__device__ inline Floats<kCount<T>> bias_at(const Rows& bias, int64_t i, int count, bool aligned) {
  if (bias.data == nullptr) return Floats<kCount<T>>(0.0f);
  return cuda::fetch<kCount<T>>(bias.row<Any>(0), i, count, aligned).elements;
}

// Adds that to the elements at some places, once for all activations.
template <class T>
__device__ inline void add_bias(const Rows& bias, bool aligned, const Place (&places)[kVectors],
                                Floats<kCount<T>> (&values)[kVectors]) {
  if (bias.data == nullptr) return;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Place& at = places[k];
    if (at.count > 0) values[k] = values[k] + bias_at<T>(bias, at.i, at.count, aligned);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 5)
    activation_kernel(const __grid_constant__ BiasActivation call, bool aligned,
                      bool bias_aligned) {
  Place places[kVectors];
  Floats<kCount<T>> values[kVectors];
  cuda::Vector<T> x[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Place& at = places[k] = cuda::place_of_vector<T>(call.rows, call.length, k);
    if (at.count > 0) x[k] = cuda::fetch_at<T>(call.x, at, aligned);
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) values[k] = floats_of(x[k]);
  add_bias<T>(call.bias, bias_aligned, places, values);
  with_activation(call.activation, [&](auto activation) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const Place& at = places[k];
      if (at.count == 0) continue;
      cuda::put<cuda::Stored::streamed>(call.out.row<T>(at.row), at.i, at.count, aligned,
                                        activation.at(values[k], Floats<kCount<T>>(0.0f)).value);
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads, std::is_same_v<T, Any> ? 4 : 5)
    backward_kernel(const __grid_constant__ BiasActivationBackward call, bool aligned,
                    bool bias_aligned) {
  Place places[kVectors];
  Vector<T> x[kVectors], grad[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Place& at = places[k] = cuda::place_of_vector<T>(call.rows, call.length, k);
    if (at.count == 0) continue;
    x[k] = cuda::fetch_at<T>(call.x, at, aligned);
    grad[k] = cuda::fetch_at<T>(call.grad_out, at, aligned);
  }
  Floats<kCount<T>> values[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) values[k] = floats_of(x[k]);
  add_bias<T>(call.bias, bias_aligned, places, values);
  with_activation(call.activation, [&](auto activation) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const Place& at = places[k];
      if (at.count == 0) continue;
      cuda::put<cuda::Stored::streamed>(call.grad_x.row<T>(at.row), at.i, at.count, aligned,
                                        activation.at(values[k], floats_of(grad[k])).grad);
    }
  });
}

// A warp takes neighbouring vectors of a row, each warp of a block another row: row by row those of
// the group, kWarps apart, some of them at a time so that their loads are under way together.
constexpr int kWarps = kThreads / kWarp;
template <class T>
constexpr int kAtATime = std::is_same_v<T, Any> ? 1 : 4;

// Depends on the number of rows alone, so the gradient of the bias is the same on any device.
// Sums of groups of 128 rows take 1 % of what 16 bits of x and of the gradient take.
int rows_of_warp(int64_t rows) {
  return int(std::clamp<int64_t>(ceil_div(rows, kWarps * 64), 16, 32));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_of_group_kernel(const __grid_constant__ BiasActivationBackward call, int rows_of_warp,
                             bool aligned, bool bias_aligned) {
  constexpr int kColumns = kWarp * kCount<T>;  // of a block
  const int64_t strips = ceil_div(call.length, kColumns);
  const int64_t group = blockIdx.x / strips, first_column = blockIdx.x % strips * kColumns;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t i = first_column + lane * kCount<T>;
  const int64_t left = call.length - i;  // negative beyond the row
  const int count = int(::max(int64_t(0), ::min(left, int64_t(kCount<T>))));
  Floats<kCount<T>> sum(0.0f);
  const auto bias = bias_at<T>(call.bias, i, count, bias_aligned);
  const int64_t first_row = group * rows_of_warp * kWarps + warp;
  for (int turn = 0; turn < rows_of_warp && count > 0; turn += kAtATime<T>) {
    Vector<T> x[kAtATime<T>], grad[kAtATime<T>];
    const int64_t row = first_row + turn * kWarps;
#pragma unroll
    for (int k = 0; k < kAtATime<T>; ++k) {
      const Place at{row + k * kWarps, i, count};
      if (turn + k >= rows_of_warp || at.row >= call.rows) continue;
      x[k] = cuda::fetch_at<T>(call.x, at, aligned);
      grad[k] = cuda::fetch_at<T>(call.grad_out, at, aligned);
    }
    with_activation(call.activation, [&](auto activation) {
#pragma unroll
      for (int k = 0; k < kAtATime<T>; ++k) {
        const int64_t at = row + k * kWarps;
        if (turn + k >= rows_of_warp || at >= call.rows) continue;
        const auto result = activation.at(floats_of(x[k]) + bias, floats_of(grad[k])).grad;
        cuda::put<cuda::Stored::streamed>(call.grad_x.row<T>(at), i, count, aligned, result);
        sum = sum + result;
      }
    });
  }
  __shared__ float of_warps[kWarps][kColumns];
#pragma unroll
  for (int k = 0; k < kCount<T>; ++k) of_warps[warp][lane * kCount<T> + k] = sum.lanes[k];
  __syncthreads();
  const int64_t column = first_column + threadIdx.x;
  if (int(threadIdx.x) >= kColumns || column >= call.length) return;
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += of_warps[w][threadIdx.x];
  cuda::store<cuda::Access::single>(call.sums.row<Any>(group) + column, Floats<1>(total), 1);
}

}  // namespace

void bias_activation_cuda(const BiasActivation& call, void* stream) {
  const bool bias_aligned = cuda::all_aligned({call.bias});
  cuda::launch_over_list(call.rows, call.length, {call.x, call.out}, kOp,
                         [&](auto storage, const cuda::ListLaunch& launch, bool aligned) {
    activation_kernel<decltype(storage)>
        <<<launch.blocks, launch.threads, 0, cudaStream_t(stream)>>>(call, aligned, bias_aligned);
  });
}

int64_t bias_activation_groups_cuda(int64_t rows) {
  return ceil_div(rows, kWarps * rows_of_warp(rows));
}

void bias_activation_backward_cuda(const BiasActivationBackward& call, void* stream) {
  if (call.rows == 0 || call.length == 0) return;
  const bool bias_aligned = cuda::all_aligned({call.bias});
  cuda::launch_over_list(call.rows, call.length, {call.x, call.grad_out, call.grad_x}, kBackwardOp,
                         [&](auto storage, const cuda::ListLaunch& launch, bool aligned) {
    using T = decltype(storage);
    if (call.sums.data == nullptr) {
      backward_kernel<T>
          <<<launch.blocks, launch.threads, 0, cudaStream_t(stream)>>>(call, aligned, bias_aligned);
    } else {
      const int64_t strips = ceil_div(call.length, kWarp * kCount<T>);
      const unsigned of_groups = unsigned(bias_activation_groups_cuda(call.rows) * strips);
      backward_of_group_kernel<T><<<of_groups, kThreads, 0, cudaStream_t(stream)>>>(
          call, rows_of_warp(call.rows), aligned, bias_aligned);
    }
  });
}

void add_bias_partials_cuda(const float* partials, int64_t groups, int64_t length, Rows grad_bias,
                            void* stream) {
  if (length == 0) return;
  cuda::add_partials(partials, groups, length, grad_bias, kBackwardOp, cudaStream_t(stream));
}

}  // namespace dsx
