// A skinny GEMM: residual + activation(x w^T + bias) for few rows of x and a low-bit weight, which
// is read once. No torch: plain pointers and numbers.
#pragma once

#include "linear/few_rows.h"
#include "common/simd/isa.h"
#include "quantization/packed_weight.h"

namespace dsx {

struct QuantizedLinear : FewRows {
  PackedWeight weight;  // gated: behind the rows of gates, those of what they gate
  bool integer;         // rows of x are rounded to 8-bit codes first; not with nf4
};

// An element of the weight is c s, or c s + o. A result is the sum over groups, from the first one
// on, of s times the sum of c x, to which o times the sum of x is added; in float32, in an order
// that depends on length and group alone. So a row has the same bits alone and beside others.
//
// integer: x is t times codes q, t being a scale for each row, as `quantize` makes them of int8
// with one group. A group, or each part of 65536 elements of a longer one, gives the integers sum
// of c q and sum of q, c being what formats.h calls so, which fit 32 bits. From the first part on
//   total = fma(s, float(sum of c q), total), and then, if there is o, fma(o, float(sum of q),
//   total)
// and the result is t total. So the bits are the same everywhere.
constexpr int64_t kExactLength = 65536;

// Columns [begin, end) of all rows. Disjoint ranges may run on different threads; the bits depend
// neither on them nor on the ISA, nor on whether the instructions of current_vnni are used beside
// Isa::avx512. Never throws.
void quantized_linear_cpu(Isa isa, bool vnni, const QuantizedLinear& call, int64_t begin,
                          int64_t end);

// Rows [begin, end) of the weight as floats, each c s or fma(c, s, o), rounded to the dtype of
// `out`. The same holds of bits and threads.
void unpack_weight_cpu(Isa isa, const PackedWeight& weight, const Rows& out, int64_t begin,
                       int64_t end);

// Both queue the same, for all columns and rows, on the stream (cudaStream_t). The sums of floats
// are in other orders there, of which that of tensor cores is chosen by dtype, format, length and
// group alone. The workspace is memory of the device. Throw std::runtime_error.
int64_t quantized_workspace_bytes(const QuantizedLinear& call);
void quantized_linear_cuda(const QuantizedLinear& call, void* workspace, void* stream);
void unpack_weight_cuda(const PackedWeight& weight, const Rows& out, void* stream);

}  // namespace dsx
