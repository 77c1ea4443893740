// Sums of squares on the CPU: walks a range of the tensor row and hands out each chunk.
#include "optimizers/l2_norm.h"

#include "optimizers/chunks.h"

#define DSX_KERNEL_SOURCE "optimizers/l2_norm_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void squares_of_chunks_cpu(Isa isa, const NormTensor* tensors, const int64_t* tensor_begin,
                           const int64_t* first_chunk, int64_t count, int64_t begin, int64_t end,
                           double* squares) {
  const auto add_up = [&](int64_t index, int64_t piece_begin, int64_t piece_end) {
    const NormTensor& tensor = tensors[index];
    double* square = squares + first_chunk[index] + piece_begin / kReductionChunk;
    for (int64_t i = piece_begin; i < piece_end; i += kReductionChunk) {
      const int64_t chunk_end = i + kReductionChunk < piece_end ? i + kReductionChunk : piece_end;
      *square++ = DSX_DISPATCH_ISA(isa, squares_of_chunk(tensor, i, chunk_end));
    }
  };
  for_each_piece<kReductionChunk>(tensor_begin, count, begin, end, add_up);
}

}  // namespace dsx
