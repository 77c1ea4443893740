// Sums of squares of the elements of tensors. No torch: plain pointers and numbers.
#pragma once

#include "common/dtype.h"
#include "common/simd/isa.h"

namespace dsx {

// Float arithmetic is faster, and as exact as the sum has to be, unless the square of an element
// overflows it, or so many underflow that the sum feels it. Such parts are added again in double,
// in which neither can happen: a sum is not finite if and only if an element is not.
struct NormTensor {
  const void* data;  // [n] at any alignment
  int64_t n;
  Dtype dtype;  // float32, bfloat16 or float16
};

// Writes the sum of squares of each chunk (kReductionChunk elements) of the range [begin, end) of
// the row that the tensors form (optimizers/chunks.h). Disjoint ranges may run on different
// threads; the result depends neither on how the row is cut nor on the ISA. Never throws.
void squares_of_chunks_cpu(Isa isa, const NormTensor* tensors,
                           const int64_t* tensor_begin,  // [count + 1] in elements
                           const int64_t* first_chunk,   // [count + 1] of each tensor, then the end
                           int64_t count, int64_t begin, int64_t end,
                           double* squares);  // [first_chunk[count]]

// How many doubles of device memory squared_norms_cuda works in.
int64_t squared_norms_workspace(const NormTensor* tensors, int64_t count);

// Queues on the stream, on the current device, the sum of squares of each tensor: the same bits in
// every run. Throws if a launch fails.
void squared_norms_cuda(const NormTensor* tensors,  // [count] host memory
                        int64_t count,
                        double* workspace,      // [squared_norms_workspace()] device memory
                        double* squared_norms,  // [count] device memory
                        void* stream);

}  // namespace dsx
