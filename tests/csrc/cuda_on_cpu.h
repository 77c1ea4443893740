// Runs CUDA kernels on the CPU, under sanitizers that know no other device: a thread of a block is
// a thread, blocks come one after the other, and shared memory is static. For kernels without
// inline assembly; test_cuda_on_cpu.py puts run_on_cpu in the place of their launches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

inline thread_local dim3 threadIdx;
inline dim3 blockIdx, blockDim, gridDim;  // of the block that all threads are in

namespace on_cpu {

constexpr int kWarp = 32, kMostThreads = 1024;

// Where threads wait for each other. One that has ended is not waited for.
struct Barriers {
  std::barrier<> block;
  std::vector<std::unique_ptr<std::barrier<>>> warps;

  explicit Barriers(int threads) : block(threads) {
    for (int left = threads; left > 0; left -= kWarp) {
      warps.push_back(std::make_unique<std::barrier<>>(std::min(left, kWarp)));
    }
  }
  std::barrier<>& warp() { return *warps[threadIdx.x / kWarp]; }
};
inline Barriers* barriers;
inline uint64_t exchanged[kMostThreads];

// What lane number `lane` of the warp has; all of the warp call it.
template <class T>
T of_lane(T mine, unsigned lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  std::memcpy(&exchanged[threadIdx.x], &mine, sizeof(T));
  barriers->warp().arrive_and_wait();
  T others;
  std::memcpy(&others, &exchanged[threadIdx.x / kWarp * kWarp + lane % kWarp], sizeof(T));
  barriers->warp().arrive_and_wait();
  return others;
}

}  // namespace on_cpu

inline void run_on_cpu(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  gridDim = dim3(blocks), blockDim = dim3(threads);
  for (unsigned block = 0; block < blocks; ++block) {
    blockIdx = dim3(block);
    on_cpu::Barriers barriers{int(threads)};
    on_cpu::barriers = &barriers;
    std::vector<std::thread> all;
    for (unsigned i = 0; i < threads; ++i) {
      all.emplace_back([&, i] {
        threadIdx = dim3(i);
        kernel();
        barriers.warp().arrive_and_drop();
        barriers.block.arrive_and_drop();
      });
    }
    for (std::thread& each : all) each.join();
  }
}

inline void __syncthreads() { on_cpu::barriers->block.arrive_and_wait(); }
template <class T>
T __shfl_xor_sync(unsigned /*lanes*/, T value, int distance) {
  return on_cpu::of_lane(value, threadIdx.x % on_cpu::kWarp ^ unsigned(distance));
}

// 16 bytes at a time only where CUDA could.
template <class T, class V>
void __stcs(T* target, const V& value) {
  if (reinterpret_cast<uintptr_t>(target) % sizeof(T) != 0) std::abort();
  *target = value;
}
template <class T>
T __ldcs(const T* source) {
  if (reinterpret_cast<uintptr_t>(source) % sizeof(T) != 0) std::abort();
  return *source;
}

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selectors) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t chosen = 0;
  for (int i = 0; i < 4; ++i) {
    chosen |= uint32_t(bytes >> (selectors >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  }
  return chosen;
}
inline uint32_t __vmaxs2(uint32_t a, uint32_t b) {
  const auto half = [&](int shift) {
    return uint32_t(uint16_t(std::max(int16_t(a >> shift), int16_t(b >> shift)))) << shift;
  };
  return half(0) | half(16);
}
inline float __fmaf_rn(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float __frsqrt_rn(float a) { return 1 / ::sqrtf(a); }
inline float __fdividef(float a, float b) { return a / b; }
