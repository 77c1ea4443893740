// grouped_quantized_linear on the CPU, for codes of DSX_BITS: the rows of an expert are a skinny
// GEMM.
#include "linear/grouped_quantized.h"
#include "linear/quantized_linear.h"

namespace dsx {

void grouped_quantized_cpu(Isa isa, bool vnni, const GroupedQuantized& call,
                           const RowsOfExpert& part, int64_t begin, int64_t end) {
  QuantizedLinear few = few_rows_of<QuantizedLinear>(call, part);
  const int64_t rows = call.weight_rows(), first = part.expert * rows;
  few.integer = call.integer;
  few.weight = call.weight;
  few.weight.rows = rows;
  few.weight.codes += first * call.weight.row_bytes;
  few.weight.scales += first;  // those of a group lie side by side, of all experts
  if (few.weight.offsets != nullptr) few.weight.offsets += first;
  quantized_linear_cpu(isa, vnni, few, begin, end);
}

}  // namespace dsx
