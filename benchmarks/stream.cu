// The ceilings of memory on CUDA, 16 bytes at a time: of an Adam step, which reads four streams of
// floats and writes three, and of a norm, which reads one.
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

constexpr int kLoads = 8;  // of a thread, all in flight

// Writes only if the words of one thread happen to cancel.
__global__ void read_kernel(const uint4* __restrict a, int64_t n, unsigned* sink) {
  const int64_t first = int64_t(blockIdx.x) * kThreads * kLoads + threadIdx.x;
  unsigned sum = 1;
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int64_t i = first + k * kThreads;
    const uint4 words = i < n ? a[i] : uint4{};
    sum += words.x ^ words.y ^ words.z ^ words.w;
  }
  if (sum == 0) *sink = sum;
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

// Reads n vectors of 16 bytes; returns the CUDA error of the launch.
extern "C" __attribute__((visibility("default"))) int read_all(const void* a, int64_t n,
                                                               unsigned* sink, void* cuda_stream) {
  constexpr int64_t kBlock = kThreads * kLoads;
  const unsigned blocks = unsigned((n + kBlock - 1) / kBlock);
  read_kernel<<<blocks, kThreads, 0, cudaStream_t(cuda_stream)>>>(static_cast<const uint4*>(a), n,
                                                                  sink);
  return int(cudaGetLastError());
}
