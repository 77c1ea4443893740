// swiglu on CUDA: all vectors of all rows are one list, of which every thread takes two.
#include "transformer/swiglu.h"

#include <algorithm>

#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/rows.cuh"

namespace dsx {

#include "transformer/swiglu_math.inl"

namespace {

constexpr int kVectors = 2;  // of a thread: the loads of both are under way together
template <class T>
constexpr int kCount = std::is_same_v<T, float> ? 4 : 8;  // elements of a vector

// Where a vector is: `count` elements of a row from number i on; 0 beyond the last vector.
struct Place {
  int64_t row = 0, i = 0;
  int count = 0;
};

// The places of the vectors of this thread, a block apart.
template <class T, class Call>
__device__ inline Place place_of_vector(const Call& call, int k) {
  const int64_t vectors = ceil_div(call.length, kCount<T>);  // of a row
  const int64_t v = (int64_t(blockIdx.x) * kVectors + k) * cuda::kThreads + threadIdx.x;
  Place place;
  if (call.rows > 1) {
    const bool fits = call.rows * vectors <= UINT32_MAX;  // in the far cheaper division
    place.row = fits ? int64_t(uint32_t(v) / uint32_t(vectors)) : v / vectors;
  }
  place.i = (v - place.row * vectors) * kCount<T>;
  if (v < call.rows * vectors) {
    place.count = int(::min(int64_t(kCount<T>), call.length - place.i));
  }
  return place;
}

template <class T>
using Vector = cuda::RowVector<T, kCount<T>>;

template <class T>
__global__ void __launch_bounds__(cuda::kThreads)
    swiglu_kernel(const __grid_constant__ Swiglu call, bool aligned) {
  Place places[kVectors];
  Vector<T> gate[kVectors], up[kVectors];
  const auto fetch = [&](const Rows& rows, const Place& at) {
    return cuda::fetch<kCount<T>>(rows.row<T>(at.row), at.i, at.count, aligned);
  };
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Place& at = places[k] = place_of_vector<T>(call, k);
    if (at.count == 0) continue;
    gate[k] = fetch(call.gate, at);
    up[k] = fetch(call.up, at);
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Place& at = places[k];
    if (at.count == 0) continue;
    cuda::put(call.out.row<T>(at.row), at.i, at.count, aligned,
              gated(floats_of(gate[k]), floats_of(up[k])));
  }
}

template <class T>
__global__ void __launch_bounds__(cuda::kThreads)
    swiglu_backward_kernel(const __grid_constant__ SwigluBackward call, bool aligned) {
  Place places[kVectors];
  Vector<T> gate[kVectors], up[kVectors], grad[kVectors];
  const auto fetch = [&](const Rows& rows, const Place& at) {
    return cuda::fetch<kCount<T>>(rows.row<T>(at.row), at.i, at.count, aligned);
  };
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Place& at = places[k] = place_of_vector<T>(call, k);
    if (at.count == 0) continue;
    gate[k] = fetch(call.gate, at);
    up[k] = fetch(call.up, at);
    grad[k] = fetch(call.grad_out, at);
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Place& at = places[k];
    if (at.count == 0) continue;
    const auto grads = gated_grads(floats_of(grad[k]), floats_of(gate[k]), floats_of(up[k]));
    cuda::put(call.grad_gate.row<T>(at.row), at.i, at.count, aligned, grads.gate);
    cuda::put(call.grad_up.row<T>(at.row), at.i, at.count, aligned, grads.up);
  }
}

// Calls launch(storage, blocks, aligned): with a value of the storage type of all rows if nothing
// is in the way of whole vectors, else of Any.
template <class Call, class Launch>
void launch_with_type(const Call& call, std::initializer_list<Rows> all, const char* op,
                      const Launch& launch) {
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  const bool aligned = cuda::all_aligned(all);
  const Dtype first = all.begin()->dtype;
  const bool same =
      std::all_of(all.begin(), all.end(), [&](const Rows& rows) { return rows.dtype == first; });
  const auto launch_with = [&](auto storage) {
    const int64_t vectors = call.rows * ceil_div(call.length, kCount<decltype(storage)>);
    launch(storage, unsigned(ceil_div(vectors, kVectors * cuda::kThreads)), aligned);
  };
  if (aligned && same && call.length % 8 == 0) {
    with_storage_type(first, launch_with);
  } else {
    launch_with(Any{});
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
