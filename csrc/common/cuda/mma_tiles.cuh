// Tiles in shared memory whose rows tensor cores multiply, and how a lane finds its part of them. A
// Shape says how many bytes a row has, and where each 16 bytes of it are.
#pragma once

#include "common/cuda/mma.cuh"

namespace dsx::cuda {

// The thread's number, found anew at each call: what follows from it is not kept in registers,
// which are scarce, from one tile to the next.
__device__ inline int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The address of a lane's row of four matrices, in a tile at `tile` whose rows they are. Tiles are
// aligned to their rows, so that a step of 16 elements changes some bits and no others.
template <class Shape>
__device__ inline unsigned begin_of_rows(unsigned tile) {  // both halves of 8 rows, then of 8 more
  const int lane = thread_here() % 32;
  return tile + Shape::place_of(lane % 16, lane / 16);
}
template <class Shape>
__device__ inline unsigned begin_of_columns(unsigned tile) {  // 16 rows, then their second halves
  const int lane = thread_here() % 32;
  return tile + Shape::place_of(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <class Shape>
__device__ inline unsigned further(unsigned begin, int rows, int step) {  // rows: of 8 or more
  return (begin ^ unsigned(step * 32)) + rows * Shape::kRowBytes;
}

// Two floats as the halves of a word, the first one lower; one instruction, of which the compiler
// does not keep the halves apart.
template <class T>
__device__ inline uint32_t rounded_pair(float first, float second) {
#if __CUDA_ARCH__ >= 800
  uint32_t word;
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  }
  return word;
#else
  return packed<T>(first, second);
#endif
}

}  // namespace dsx::cuda
