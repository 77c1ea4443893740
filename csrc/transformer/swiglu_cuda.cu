// swiglu on CUDA: every thread takes one vector of elements of a row.
#include "transformer/swiglu.h"

#include <algorithm>

#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/rows.cuh"

namespace dsx {

#include "transformer/swiglu_math.inl"

namespace {

using cuda::kRowVector;
using Values = cuda::Floats<kRowVector>;

// Calls body(row, i, count) for the vector of this thread: `count` elements from number i on.
template <class Body>
__device__ void for_vector_of_thread(int64_t rows, int64_t length, const Body& body) {
  const int64_t vectors = ceil_div(length, kRowVector);  // of a row
  const int64_t all = rows * vectors, step = int64_t(gridDim.x) * cuda::kThreads;
  for (int64_t v = int64_t(blockIdx.x) * cuda::kThreads + threadIdx.x; v < all; v += step) {
    const int64_t row = rows == 1 ? 0 : v / vectors;
    const int64_t i = (v - row * vectors) * kRowVector;
    body(row, i, int(::min(int64_t(kRowVector), length - i)));
  }
}

template <class T>
__global__ void __launch_bounds__(cuda::kThreads)
    swiglu_kernel(const __grid_constant__ Swiglu call, bool aligned) {
  for_vector_of_thread(call.rows, call.length, [&](int64_t row, int64_t i, int count) {
    const auto gate = cuda::fetch(call.gate.row<T>(row), i, count, aligned);
    const auto up = cuda::fetch(call.up.row<T>(row), i, count, aligned);
    cuda::put(call.out.row<T>(row), i, count, aligned, gated(floats_of(gate), floats_of(up)));
  });
}

template <class T>
__global__ void __launch_bounds__(cuda::kThreads)
    swiglu_backward_kernel(const __grid_constant__ SwigluBackward call, bool aligned) {
  for_vector_of_thread(call.rows, call.length, [&](int64_t row, int64_t i, int count) {
    const auto gate = cuda::fetch(call.gate.row<T>(row), i, count, aligned);
    const auto up = cuda::fetch(call.up.row<T>(row), i, count, aligned);
    const auto grad = cuda::fetch(call.grad_out.row<T>(row), i, count, aligned);
    const GatedGrads<Values> grads = gated_grads(floats_of(grad), floats_of(gate), floats_of(up));
    cuda::put(call.grad_gate.row<T>(row), i, count, aligned, grads.gate);
    cuda::put(call.grad_up.row<T>(row), i, count, aligned, grads.up);
  });
}

// Calls launch(storage, blocks, aligned): with a value of the storage type of all rows if nothing
// is in the way of whole vectors, else of Any.
template <class Call, class Launch>
void launch_with_type(const Call& call, std::initializer_list<Rows> all, const char* op,
                      const Launch& launch) {
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  const int64_t vectors = call.rows * ceil_div(call.length, kRowVector);
  const unsigned blocks = unsigned(std::min<int64_t>(ceil_div(vectors, cuda::kThreads), 1 << 30));
  const bool aligned = cuda::all_aligned(all);
  const Dtype first = all.begin()->dtype;
  const bool same =
      std::all_of(all.begin(), all.end(), [&](const Rows& rows) { return rows.dtype == first; });
  if (aligned && same && call.length % kRowVector == 0) {
    with_storage_type(first, [&](auto storage) { launch(storage, blocks, aligned); });
  } else {
    launch(Any{}, blocks, aligned);
  }
  cuda::check(cudaGetLastError(), op);
}

}  // namespace

void swiglu_cuda(const Swiglu& call, void* stream) {
  launch_with_type(call, {call.gate, call.up, call.out}, "swiglu",
                   [&](auto storage, unsigned blocks, bool aligned) {
    swiglu_kernel<decltype(storage)>
        <<<blocks, cuda::kThreads, 0, cudaStream_t(stream)>>>(call, aligned);
  });
}

void swiglu_backward_cuda(const SwigluBackward& call, void* stream) {
  launch_with_type(call, {call.gate, call.up, call.grad_out, call.grad_gate, call.grad_up},
                   "swiglu_backward", [&](auto storage, unsigned blocks, bool aligned) {
    swiglu_backward_kernel<decltype(storage)>
        <<<blocks, cuda::kThreads, 0, cudaStream_t(stream)>>>(call, aligned);
  });
}

}  // namespace dsx
