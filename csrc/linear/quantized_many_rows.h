// x w^T + bias for more rows of x than a skinny GEMM has, w being of codes that become floats only
// where they are multiplied. For CUDA of compute capability 9.0. No torch: plain pointers and
// numbers.
#pragma once

#include "common/rows.h"
#include "quantization/packed_weight.h"

namespace dsx {

struct QuantizedManyRows {
  Rows x;     // bfloat16 or float16, evenly pitched
  Rows bias;  // one row, of x's dtype; absent: zeros
  Rows out;   // [rows, those of the weight] written, of x's dtype
  int64_t rows;
  PackedWeight weight;
};

// Whether the kernel takes such a weight, beside rows of a dtype, wherever both lie in memory.
inline bool takes_many_rows(const PackedWeight& weight, Dtype dtype) {
  constexpr int64_t kLine = kPackedLineBytes * 8 / DSX_BITS, kRun = kRunBytes * 8 / DSX_BITS;
  const bool lines = weight.group >= weight.length || weight.group % kLine == 0;
  const bool parts = weight.group >= kRun && kLine % weight.group == 0;
  return dtype != Dtype::float32 && weight.format != QuantFormat::nf4 &&
         weight.length % (kPackedLineBytes / 2) == 0 && (lines || parts);
}

// Queues it on the stream (cudaStream_t): elements of the weight as unpack_weight makes them of x's
// dtype, products added up in float32, in an order that depends on sizes and device alone. All rows
// of x, of the weight and of scales begin at multiples of 16 bytes. False: nothing is queued, as
// the device is another one, or its code. Throws std::runtime_error.
bool quantized_many_rows_cuda(const QuantizedManyRows& call, void* stream);

}  // namespace dsx
