// Walks a range of the row that a list of tensors forms, and hands each piece to the loop of one
// ISA. For the *_cpu.cpp of an optimizer, after common/simd/foreach_isa.h.
#pragma once

#include <limits>

#include "common/chunks.h"
#include "optimizers/step.h"

namespace dsx {

static_assert(kElementwiseChunk % kCodesBlock == 0);

template <class Rule>
void walk(Isa isa, const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
          const int64_t* tensor_begin, int64_t count, int64_t begin, int64_t end) {
  // Most tensors have taken equally many steps: work the constants out once for a run of them.
  float step_of_constants = std::numeric_limits<float>::quiet_NaN();  // equal to no tensor's
  Prepared<Rule> prepared{};
  const auto visit = [&](int64_t index, int64_t piece_begin, int64_t piece_end) {
    const StepTensor<Rule::kStates>& tensor = tensors[index];
    if (*tensor.step != step_of_constants) {
      step_of_constants = *tensor.step;
      prepared = prepare(call, tensor.noise, step_of_constants);
    } else if (tensor.noise.on) {
      prepared.noise = make_noise(tensor.noise, step_of_constants);
    }
    DSX_DISPATCH_ISA(isa, step(call.types, tensor, prepared, piece_begin, piece_end));
  };
  for_each_piece<kElementwiseChunk>(tensor_begin, count, begin, end, visit);
}

}  // namespace dsx
