// A skinny GEMM: residual + activation(x w^T + bias) for few rows of x, reading w once. No torch:
// plain pointers and numbers.
#pragma once

#include "linear/few_rows.h"
#include "common/simd/isa.h"

namespace dsx {

// All tensors have the dtype of x.
struct SkinnyLinear : FewRows {
  Rows weight;  // a row for each column; gated: behind those of the gates, those of what they gate
};

// A result is a sum over the length, in an order that depends on the length alone: 16 running sums
// on the CPU, of which element k belongs to number k % 16, that begin anew every 4096 elements; on
// CUDA as skinny_linear_cuda.cu says. So a row has the same bits alone and beside others.

// Columns [begin, end) of all rows. Disjoint ranges may run on different threads; the bits depend
// neither on them nor on the ISA. Never throws.
void skinny_linear_cpu(Isa isa, const SkinnyLinear& call, int64_t begin, int64_t end);

// Queues the same, for all columns, on the stream (cudaStream_t). Throws std::runtime_error.
void skinny_linear_cuda(const SkinnyLinear& call, void* stream);

}  // namespace dsx
