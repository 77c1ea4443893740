// Sums of squares on CUDA: every block adds up one chunk of one tensor, then a small kernel adds
// the chunks of each tensor.
#include "optimizers/l2_norm.h"

#include <algorithm>

#include "optimizers/chunks.h"
#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "optimizers/reduce_cuda.cuh"
#include "common/cuda/vector_io.cuh"

namespace dsx {
namespace {

constexpr const char* kOp = "squared_norms";
constexpr int kTensorsPerLaunch = 1024;
constexpr int64_t kNormChunk = 32768;  // elements of a block

struct NormBatch {
  NormTensor tensors[kTensorsPerLaunch];  // [count] of them
  int first_block[kTensorsPerLaunch];     // [count] of each tensor
  double* squares;                        // [blocks] written
  int count;
};
static_assert(sizeof(NormBatch) <= cuda::kMaxKernelParameterBytes);

int64_t chunks_of(const NormTensor& tensor) { return cuda::chunks_of(tensor.n, kNormChunk); }

template <class T, int kCount>
__device__ cuda::Floats<kCount> widen(const cuda::Elements<T, kCount>& elements) {
  cuda::Floats<kCount> floats;
#pragma unroll
  for (int k = 0; k < kCount; ++k) floats.lanes[k] = cuda::widen(elements.lanes[k]);
  return floats;
}

// Hands this thread its part of n elements, 16 bytes at a time where the address allows it.
template <class T, class Body>
__device__ void for_each_access(const T* source, int n, const Body& body) {
  constexpr int kCount = 16 / sizeof(T);
  constexpr int kStride = cuda::kThreads * kCount;
  constexpr int kInFlight = 4;  // loads that are asked for before the first is looked at
  const auto load = [&](int i) {
    return cuda::load_elements<cuda::Access::vector, kCount>(source + i, kCount);
  };
  int scalar_begin = 0;
  if (cuda::is_aligned<kCount>(source, sizeof(T))) {
    scalar_begin = n / kCount * kCount;
    int i = threadIdx.x * kCount;
    for (; i + (kInFlight - 1) * kStride < scalar_begin; i += kInFlight * kStride) {
      cuda::Elements<T, kCount> elements[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) elements[k] = load(i + k * kStride);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) body(widen(elements[k]));
    }
    for (; i < scalar_begin; i += kStride) body(widen(load(i)));
  }
  for (int i = scalar_begin + threadIdx.x; i < n; i += cuda::kThreads) {
    body(cuda::Floats<1>{{cuda::widen(source[i])}});
  }
}

// The squares added in float in a fixed tree: off by at most log2(kCount) + 1 roundings.
template <int kCount>
__device__ float squares_in_float(cuda::Floats<kCount> values) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) values.lanes[k] *= values.lanes[k];
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) values.lanes[k] += values.lanes[k + half];
  }
  return values.lanes[0];
}

// Of this thread's part of n elements.
template <class T>
__device__ double squares_of_thread(const T* source, int n) {
  // Underflow takes at most 2^-150 of each of the 128 squares: less than a rounding of this.
  static_assert(kNormChunk <= 128 * cuda::kThreads);
  constexpr double kLeast = 0x1p-118;
  double sum = 0;
  uint32_t bits = 0;  // of all elements, one or the other
  for_each_access(source, n, [&](const auto& values) {
    for (float value : values.lanes) bits |= bits_of(value);
    sum += squares_in_float(values);
  });
  const bool all_zero = bits << 1 == 0;  // but for the sign
  if ((sum >= kLeast && sum < INFINITY) || all_zero) return sum;
  sum = 0;
  for_each_access(source, n, [&](const auto& values) {
    for (float value : values.lanes) sum += double(value) * double(value);
  });
  return sum;
}

__global__ void __launch_bounds__(cuda::kThreads)
    squares_kernel(const __grid_constant__ NormBatch batch) {
  const int index = cuda::tensor_of_block(batch.first_block, batch.count, blockIdx.x);
  const NormTensor& tensor = batch.tensors[index];
  const int64_t begin = int64_t(int(blockIdx.x) - batch.first_block[index]) * kNormChunk;
  const int n = int(::min(kNormChunk, tensor.n - begin));
  double sums[1];
  switch (tensor.dtype) {
    case Dtype::bfloat16:
      sums[0] = squares_of_thread(static_cast<const BFloat16*>(tensor.data) + begin, n);
      break;
    case Dtype::float16:
      sums[0] = squares_of_thread(static_cast<const Half*>(tensor.data) + begin, n);
      break;
    case Dtype::float32:
      sums[0] = squares_of_thread(static_cast<const float*>(tensor.data) + begin, n);
      break;
  }
  cuda::store_block_sums(sums, batch.squares + blockIdx.x);
}

}  // namespace

int64_t squared_norms_workspace(const NormTensor* tensors, int64_t count) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) chunks += chunks_of(tensors[i]);
  return chunks;
}

void squared_norms_cuda(const NormTensor* tensors, int64_t count, double* workspace,
                        double* squared_norms, void* stream) {
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  const std::vector<int64_t> first_chunk =
      begins_of(size_t(count), [&](size_t i) { return chunks_of(tensors[i]); });
  NormBatch batch;
  for (int64_t first = 0; first < count; first += kTensorsPerLaunch) {
    batch.squares = workspace + first_chunk[size_t(first)];
    const int64_t blocks = cuda::fill_launch(
        batch, std::min<int64_t>(kTensorsPerLaunch, count - first), [&](int64_t i) {
      return tensors[first + i];
    }, [&](int64_t i) { return chunks_of(tensors[first + i]); });
    if (blocks == 0) continue;  // CUDA rejects an empty grid
    squares_kernel<<<unsigned(blocks), cuda::kThreads, 0, cudaStream_t(stream)>>>(batch);
    cuda::check(cudaGetLastError(), kOp);
  }
  cuda::launch_add_blocks<1>(first_chunk.data(), count, workspace, squared_norms,
                             cudaStream_t(stream), kOp);
}

}  // namespace dsx
