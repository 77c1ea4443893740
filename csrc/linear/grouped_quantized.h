// Products of few rows with the quantized weights of their experts. No torch: plain pointers and
// numbers.
#pragma once

#include "common/simd/isa.h"
#include "linear/grouped_rows.h"
#include "quantization/packed_weight.h"

namespace dsx {

struct GroupedQuantized : GroupedRows {
  // experts * weight_rows() rows. Gated: behind an expert's rows of gates, those of what they gate.
  PackedWeight weight;
  bool integer;  // rows of x are rounded to 8-bit codes first; not with nf4
};

// A row has the bits that quantized_linear gives it with its expert's weight, whatever the others
// are.

// Columns [begin, end) of some rows of one expert; `vnni` is as of quantized_linear_cpu. Disjoint
// ranges and rows may run on different threads; the bits depend neither on them nor on the ISA.
// Never throws. Rows behind the last offset are nobody's, and not written.
void grouped_quantized_cpu(Isa isa, bool vnni, const GroupedQuantized& call,
                           const RowsOfExpert& part, int64_t begin, int64_t end);

// Queues all of it on the stream (cudaStream_t), rows behind the last offset too. The workspace is
// memory of the device; nothing on it is read by the host. Throws std::runtime_error.
int64_t grouped_workspace_bytes(const GroupedQuantized& call);
void grouped_quantized_cuda(const GroupedQuantized& call, void* workspace, void* stream);

}  // namespace dsx
