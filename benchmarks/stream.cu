// The ceiling of an Adam step on CUDA: reads four streams of floats and writes three, 16 bytes at a
// time.
#include <cstdint>

namespace {

constexpr int kThreads = 256;

__device__ float4 middle(float4 x, float4 y) {
  return {0.5f * (x.x + y.x), 0.5f * (x.y + y.y), 0.5f * (x.z + y.z), 0.5f * (x.w + y.w)};
}

__global__ void stream_kernel(float4* __restrict a, float4* __restrict b, float4* __restrict c,
                              const float4* __restrict d, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const float4 value = d[i];
  const float4 x = a[i], y = b[i], z = c[i];
  a[i] = middle(x, value);
  b[i] = middle(y, value);
  c[i] = middle(z, value);
}

}  // namespace

// n is a multiple of 4; returns the CUDA error of the launch.
extern "C" __attribute__((visibility("default"))) int stream(float* a, float* b, float* c,
                                                             const float* d, int64_t n,
                                                             void* cuda_stream) {
  const int64_t vectors = n / 4;
  const unsigned blocks = unsigned((vectors + kThreads - 1) / kThreads);
  const auto as_vectors = [](auto* address) { return reinterpret_cast<float4*>(address); };
  stream_kernel<<<blocks, kThreads, 0, cudaStream_t(cuda_stream)>>>(
      as_vectors(a), as_vectors(b), as_vectors(c), reinterpret_cast<const float4*>(d), vectors);
  return int(cudaGetLastError());
}
