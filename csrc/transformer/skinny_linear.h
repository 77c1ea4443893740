// residual + activation(x w^T + bias) for few rows of x, reading w once. No torch: plain pointers
// and numbers.
#pragma once

#include "common/rows.h"
#include "common/simd/isa.h"
#include "transformer/activation.h"

namespace dsx {

constexpr int64_t kMostRows = 64;

// All tensors have the dtype of x.
struct SkinnyLinear {
  int64_t rows;     // of x and of the results, up to kMostRows
  int64_t columns;  // of the results
  int64_t length;   // of rows of x and of the weight
  bool activated;   // or the sums are the results
  bool gated;       // only if activated
  Activation activation;
  Rows x;
  Rows weight;  // a row for each column; gated: behind those of the gates, those of what they gate
  Rows bias;    // one row, with an element for each row of the weight; absent: zeros
  Rows residual;  // absent: zeros
  Rows out;       // written
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
