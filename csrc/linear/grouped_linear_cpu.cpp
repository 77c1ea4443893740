// grouped_linear on the CPU: the rows of an expert are a skinny GEMM.
#include "linear/grouped_linear.h"
#include "linear/skinny_linear.h"

namespace dsx {

void grouped_linear_cpu(Isa isa, const GroupedLinear& call, const RowsOfExpert& part, int64_t begin,
                        int64_t end) {
  SkinnyLinear few = few_rows_of<SkinnyLinear>(call, part);
  const Rows& weight = call.weight;
  few.weight = {weight.row<Any>(part.expert * call.weight_rows()).address, weight.pitch,
                weight.dtype};
  skinny_linear_cpu(isa, few, begin, end);
}

}  // namespace dsx
