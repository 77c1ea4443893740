// Skinny GEMMs side by side: activation(x w^T + bias), each row with the weight and bias of its own
// expert. No torch: plain pointers and numbers.
#pragma once

#include "linear/few_rows.h"
#include "linear/row_groups.h"

namespace dsx {

// All tensors have the dtype of x. `columns` are those of an expert; no norms, no residual.
struct GroupedLinear : FewRows {
  RowGroups groups;
  Rows weight;  // as skinny_linear's, expert by expert
};

void grouped_linear_cuda(const GroupedLinear& call, void* stream);

}  // namespace dsx
