// Products of few rows with the weights of their experts. No torch: plain pointers and numbers.
#pragma once

#include "common/simd/isa.h"
#include "linear/grouped_rows.h"

namespace dsx {

// All tensors have the dtype of x.
struct GroupedLinear : GroupedRows {
  // experts * weight_rows() rows: Rows::group is weight_rows(), and Rows::group_pitch the distance
  // of experts. Gated: behind an expert's rows of gates, those of what they gate.
  Rows weight;
};

// A row has the bits that skinny_linear gives it with its expert's weight, whatever the others are.

// Columns [begin, end) of some rows of one expert. Disjoint ranges and rows may run on different
// threads; the bits depend neither on them nor on the ISA. Never throws. Rows behind the last
// offset are nobody's, and not written.
void grouped_linear_cpu(Isa isa, const GroupedLinear& call, const RowsOfExpert& part, int64_t begin,
                        int64_t end);

// Queues all of it on the stream (cudaStream_t), rows behind the last offset too. The workspace is
// memory of the device; nothing on it is read by the host. Throws std::runtime_error.
int64_t grouped_workspace_bytes(const GroupedLinear& call);
void grouped_linear_cuda(const GroupedLinear& call, void* workspace, void* stream);

// Queues zeros for so many columns of the rows from *end on, of `count`: those that are nobody's.
// Throws std::runtime_error.
void clear_rows_cuda(const Rows& rows, int64_t count, int64_t columns, const int32_t* end,
                     void* stream);

}  // namespace dsx
