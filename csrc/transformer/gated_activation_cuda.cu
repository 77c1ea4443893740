// Gated activations on CUDA.
#include "transformer/gated_activation.h"

#include "common/cuda/check.h"
#include "common/cuda/row_list.cuh"

namespace dsx {

#include "transformer/activation_math.inl"
#include "transformer/gated_activation_math.inl"

namespace {

using cuda::FetchedVectors;
using cuda::Place;

template <class T>
__global__ void __launch_bounds__(cuda::kThreads)
    gated_activation_kernel(const __grid_constant__ GatedActivation call, bool aligned) {
  using Vectors = FetchedVectors<T, 2>;
  const Vectors vectors(call.rows, call.length, {&call.gate, &call.up}, aligned);
  with_activation(call.activation, [&](auto activation) {
    vectors.for_each([&](const Place& at, const typename Vectors::Values(&values)[2]) {
      const auto result = gated<decltype(activation)>(values[0], values[1]);
      cuda::put(call.out.row<T>(at.row), at.i, at.count, aligned, result);
    });
  });
}

template <class T>
__global__ void __launch_bounds__(cuda::kThreads)
    gated_activation_backward_kernel(const __grid_constant__ GatedActivationBackward call,
                                     bool aligned) {
  using Vectors = FetchedVectors<T, 3>;
  const Vectors vectors(call.rows, call.length, {&call.gate, &call.up, &call.grad_out}, aligned);
  with_activation(call.activation, [&](auto activation) {
    vectors.for_each([&](const Place& at, const typename Vectors::Values(&values)[3]) {
      const auto grads = gated_grads<decltype(activation)>(values[2], values[0], values[1]);
      cuda::put(call.grad_gate.row<T>(at.row), at.i, at.count, aligned, grads.gate);
      cuda::put(call.grad_up.row<T>(at.row), at.i, at.count, aligned, grads.up);
    });
  });
}

}  // namespace

void gated_activation_cuda(const GatedActivation& call, void* stream) {
  cuda::launch_over_list(call.rows, call.length, {call.gate, call.up, call.out}, "gated_activation",
                         [&](auto storage, unsigned blocks, bool aligned) {
    gated_activation_kernel<decltype(storage)>
        <<<blocks, cuda::kThreads, 0, cudaStream_t(stream)>>>(call, aligned);
  });
}

void gated_activation_backward_cuda(const GatedActivationBackward& call, void* stream) {
  cuda::launch_over_list(
      call.rows, call.length, {call.gate, call.up, call.grad_out, call.grad_gate, call.grad_up},
      "gated_activation_backward", [&](auto storage, unsigned blocks, bool aligned) {
    gated_activation_backward_kernel<decltype(storage)>
        <<<blocks, cuda::kThreads, 0, cudaStream_t(stream)>>>(call, aligned);
  });
}

}  // namespace dsx
