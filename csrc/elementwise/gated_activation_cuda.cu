// Gated activations on CUDA.
#include "elementwise/gated_activation.h"

#include "common/cuda/check.h"
#include "elementwise/row_list_cuda.cuh"

namespace dsx {

#include "common/activation_math.inl"
#include "elementwise/gated_activation_math.inl"

namespace {

using cuda::kCount;
using cuda::kVectors;
using cuda::Place;
using cuda::Vector;

template <class T>
__global__ void __launch_bounds__(cuda::kThreads)
    gated_activation_kernel(const __grid_constant__ GatedActivation call, bool aligned) {
  Place places[kVectors];
  Vector<T> gate[kVectors], up[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Place& at = places[k] = cuda::place_of_vector<T>(call.rows, call.length, k);
    if (at.count == 0) continue;
    gate[k] = cuda::fetch_at<T>(call.gate, at, aligned);
    up[k] = cuda::fetch_at<T>(call.up, at, aligned);
  }
  with_activation(call.activation, [&](auto activation) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const Place& at = places[k];
      if (at.count == 0) continue;
      cuda::put<cuda::Stored::streamed>(
          call.out.row<T>(at.row), at.i, at.count, aligned,
          gated<decltype(activation)>(floats_of(gate[k]), floats_of(up[k])));
    }
  });
}

template <class T>
__global__ void __launch_bounds__(cuda::kThreads)
    gated_activation_backward_kernel(const __grid_constant__ GatedActivationBackward call,
                                     bool aligned) {
  Place places[kVectors];
  Vector<T> gate[kVectors], up[kVectors], grad[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Place& at = places[k] = cuda::place_of_vector<T>(call.rows, call.length, k);
    if (at.count == 0) continue;
    gate[k] = cuda::fetch_at<T>(call.gate, at, aligned);
    up[k] = cuda::fetch_at<T>(call.up, at, aligned);
    grad[k] = cuda::fetch_at<T>(call.grad_out, at, aligned);
  }
  with_activation(call.activation, [&](auto activation) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const Place& at = places[k];
      if (at.count == 0) continue;
      const auto grads = gated_grads<decltype(activation)>(floats_of(grad[k]), floats_of(gate[k]),
                                                           floats_of(up[k]));
      cuda::put<cuda::Stored::streamed>(call.grad_gate.row<T>(at.row), at.i, at.count, aligned,
                                        grads.gate);
      cuda::put<cuda::Stored::streamed>(call.grad_up.row<T>(at.row), at.i, at.count, aligned,
                                        grads.up);
    }
  });
}

}  // namespace

void gated_activation_cuda(const GatedActivation& call, void* stream) {
  const auto all = {call.gate, call.up, call.out};
  cuda::launch_over_list(call.rows, call.length, all, "gated_activation",
                         [&](auto storage, const cuda::ListLaunch& launch, bool aligned) {
    gated_activation_kernel<decltype(storage)>
        <<<launch.blocks, launch.threads, 0, cudaStream_t(stream)>>>(call, aligned);
  });
}

void gated_activation_backward_cuda(const GatedActivationBackward& call, void* stream) {
  const auto all = {call.gate, call.up, call.grad_out, call.grad_gate, call.grad_up};
  cuda::launch_over_list(call.rows, call.length, all, "gated_activation_backward",
                         [&](auto storage, const cuda::ListLaunch& launch, bool aligned) {
    gated_activation_backward_kernel<decltype(storage)>
        <<<launch.blocks, launch.threads, 0, cudaStream_t(stream)>>>(call, aligned);
  });
}

}  // namespace dsx
