// Square roots and quotients of several floats at once, which have their own steps in CUDA, against
// the instructions that round correctly: all roots, and quotients of all kinds of magnitudes.
#include "common/cuda/floats.cuh"

#include <cstdint>

#include "expect.h"

using dsx::cuda::Floats;

namespace {

constexpr int kLanes = 8, kThreads = 256;
constexpr int64_t kAll = int64_t(1) << 32;

__device__ uint32_t shuffled(uint64_t x) {  // the finalizer of SplitMix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return uint32_t((x ^ (x >> 31)) >> 16);
}

__device__ bool same(float a, float b) {
  return dsx::bits_of(a) == dsx::bits_of(b) || (isnan(a) && isnan(b));
}

__global__ void wrong_roots(unsigned long long* wrong) {
  const int64_t first = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kLanes;
  Floats<kLanes> values;
  for (int k = 0; k < kLanes; ++k) values.lanes[k] = dsx::float_of(uint32_t(first + k));
  const Floats<kLanes> roots = sqrt(values);
  for (int k = 0; k < kLanes; ++k) {
    if (!same(roots.lanes[k], __fsqrt_rn(values.lanes[k]))) atomicAdd(wrong, 1);
  }
}

// `ordinary`: magnitudes that the short way takes, but for few; else any bits at all.
__global__ void wrong_quotients(uint64_t seed, bool ordinary, unsigned long long* wrong) {
  const uint64_t first = seed * kAll + (uint64_t(blockIdx.x) * kThreads + threadIdx.x) * kLanes;
  Floats<kLanes> a, b;
  for (int k = 0; k < kLanes; ++k) {
    uint32_t bits_a = shuffled(2 * (first + k)), bits_b = shuffled(2 * (first + k) + 1);
    if (ordinary) {  // exponents around the ends of the short way, in the middle for most
      const uint32_t exponent_a = 127 - 92 + (bits_a >> 23 & 0xff) % 154;
      const uint32_t exponent_b = 127 - 62 + (bits_b >> 23 & 0xff) % 94;
      bits_a = (bits_a & 0x807fffff) | exponent_a << 23;
      bits_b = (bits_b & 0x807fffff) | exponent_b << 23;
    }
    a.lanes[k] = dsx::float_of(bits_a);
    b.lanes[k] = dsx::float_of(bits_b);
  }
  const Floats<kLanes> quotients = a / b;
  for (int k = 0; k < kLanes; ++k) {
    if (!same(quotients.lanes[k], __fdiv_rn(a.lanes[k], b.lanes[k]))) atomicAdd(wrong, 1);
  }
}

}  // namespace

int main() {
  unsigned long long* wrong;
  if (cudaMallocHost(&wrong, sizeof(*wrong)) != cudaSuccess) return 2;
  *wrong = 0;
  constexpr unsigned kBlocks = unsigned(kAll / (kThreads * kLanes));
  wrong_roots<<<kBlocks, kThreads>>>(wrong);
  expect(cudaDeviceSynchronize() == cudaSuccess, "roots did not run");
  expect(*wrong == 0, "%llu roots differ", *wrong);
  *wrong = 0;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    wrong_quotients<<<kBlocks, kThreads>>>(seed, seed % 4 != 0, wrong);
  }
  expect(cudaDeviceSynchronize() == cudaSuccess, "quotients did not run");
  expect(*wrong == 0, "%llu quotients differ", *wrong);
  return finish();
}
