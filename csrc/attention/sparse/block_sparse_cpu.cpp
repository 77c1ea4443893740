// block_sparse_attention on the CPU: picks the instruction set.
#include "attention/sparse/block_sparse.h"

#include <type_traits>

#define DSX_KERNEL_SOURCE "attention/sparse/block_sparse_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void attend_rows_cpu(Isa isa, const BlockSparse& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, attend_rows(call, begin, end));
}

void backward_of_rows_cpu(Isa isa, const BlockSparseBackward& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, backward_of_rows(call, begin, end));
}

void backward_of_columns_cpu(Isa isa, const BlockSparseBackward& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, backward_of_columns(call, begin, end));
}

}  // namespace dsx
