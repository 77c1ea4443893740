// Adam on the CPU: walks a range of the tensor row and hands each piece to the loop of one ISA.
#include <limits>

#include "common/chunks.h"
#include "common/simd/prefetch.h"
#include "optimizers/adam.h"

#define DSX_KERNEL_SOURCE "optimizers/adam_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void adam_cpu(Isa isa, const AdamCall& call, const AdamTensor* tensors, const int64_t* tensor_begin,
              int64_t count, int64_t begin, int64_t end) {
  // Most tensors have taken equally many steps: work the constants out once for a run of them.
  float step_of_constants = std::numeric_limits<float>::quiet_NaN();  // equal to no tensor's
  AdamStep constants{};
  const auto update = [&](int64_t index, int64_t piece_begin, int64_t piece_end) {
    const AdamTensor& tensor = tensors[index];
    if (*tensor.step != step_of_constants) {
      step_of_constants = *tensor.step;
      constants = make_adam_step(call.options, step_of_constants);
    }
    DSX_DISPATCH_ISA(isa, adam(call, tensor, constants, piece_begin, piece_end));
  };
  for_each_piece<kElementwiseChunk>(tensor_begin, count, begin, end, update);
}

}  // namespace dsx
