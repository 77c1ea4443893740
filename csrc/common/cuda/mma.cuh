// Tensor cores of compute capability 8.0 on: products of matrices of 16 bits whose elements lie in
// the registers of a warp. Of a lane, `row` is lane / 4 and `pair` lane % 4.
#pragma once

#include <cstdint>

#include "common/cuda/convert.cuh"

namespace dsx::cuda {

// Reads four 8 x 8 matrices of 16-bit elements from shared memory, the rows of number i where lanes
// 8 i to 8 i + 7 say: element [row][2 pair] and the next one, as the halves of a word of each. The
// address is one of shared memory, of 16 bytes. Transposed, elements [2 pair][row] and
// [2 pair + 1][row].
template <bool kTransposed>
__device__ inline void load_matrices(uint32_t (&words)[4], unsigned address) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

template <bool kTransposed>
__device__ inline void load_matrices(uint32_t (&words)[4], const void* address) {
  load_matrices<kTransposed>(words, unsigned(__cvta_generic_to_shared(address)));
}

// The same matrix transposed, of 8 x 8 elements that lie as load_matrices says.
__device__ inline uint32_t transposed_matrix(uint32_t word) {
#if __CUDA_ARCH__ >= 800
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
#else
  return word;
#endif
}

// c += a b, of a [16 x 16], b [16 x 8], c [16 x 8]. Words of a: rows 0 to 7 and 8 to 15 of columns
// 0 to 7, the same of columns 8 to 15, each as load_matrices says; of b, which is transposed:
// elements [2 pair][row] and the next below, then 8 further down; of c: elements [row][2 pair] and
// the next, then 8 rows further down.
template <class T>
__device__ inline void multiply_matrices(float (&c)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
        " {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
        " {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#endif
}

// The same of bytes with signs, exactly: a [16 x 32], b [32 x 8]. The words have four bytes of a
// row, or column, each: of a, 4 pair and the next of rows 0 to 7 and 8 to 15, then 16 further on.
__device__ inline void multiply_bytes(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Two floats as the halves of a word, the first one lower.
template <class T>
__device__ inline uint32_t packed(float first, float second) {
  return uint32_t(narrow<T>(first).bits) | uint32_t(narrow<T>(second).bits) << 16;
}

}  // namespace dsx::cuda
