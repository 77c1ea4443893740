// Walks a range of the row that a list of tensors forms, and hands each piece to the loop of one
// ISA. For the *_cpu.cpp of an optimizer, after common/simd/foreach_isa.h.
#pragma once

#include <limits>

#include "common/chunks.h"
#include "optimizers/step.h"

namespace dsx {

static_assert(kElementwiseChunk % kCodesBlock == 0 && kReductionChunk % kCodesBlock == 0);

// The constants of one tensor's step after the other's. Most tensors have taken equally many steps:
// they are worked out once for a run of them.
template <class Rule>
class PreparedInTurn {
 public:
  explicit PreparedInTurn(const StepCall<Rule>& call) : call_(call) {}

  const Prepared<Rule>& of(const StepTensor<Rule::kStates>& tensor, int64_t index) {
    const float step = tensor.step == nullptr ? 0 : *tensor.step;
    if (step != step_ || call_.coefficients != nullptr) {
      step_ = step;
      prepared_ = prepare(call_, index, tensor.noise, step);
    } else if (tensor.noise.on) {
      prepared_.noise = make_noise(tensor.noise, step);
    }
    return prepared_;
  }

 private:
  const StepCall<Rule>& call_;
  float step_ = std::numeric_limits<float>::quiet_NaN();  // equal to no tensor's
  Prepared<Rule> prepared_{};
};

template <class Rule>
void walk(Isa isa, const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
          const int64_t* tensor_begin, int64_t count, int64_t begin, int64_t end) {
  PreparedInTurn<Rule> prepared(call);
  const auto visit = [&](int64_t index, int64_t piece_begin, int64_t piece_end) {
    const StepTensor<Rule::kStates>& tensor = tensors[index];
    const Prepared<Rule>& constants = prepared.of(tensor, index);
    DSX_DISPATCH_ISA(isa, step(call.types, tensor, constants, piece_begin, piece_end));
  };
  for_each_piece<kElementwiseChunk>(tensor_begin, count, begin, end, visit);
}

// The same for a rule that measures: writes the sums of squares of each chunk of kReductionChunk.
template <class Rule>
void walk_chunks(Isa isa, const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
                 const int64_t* tensor_begin, const int64_t* first_chunk, int64_t count,
                 int64_t begin, int64_t end, double* squares) {
  PreparedInTurn<Rule> prepared(call);
  const auto visit = [&](int64_t index, int64_t piece_begin, int64_t piece_end) {
    const StepTensor<Rule::kStates>& tensor = tensors[index];
    const Prepared<Rule>& constants = prepared.of(tensor, index);
    for (int64_t i = piece_begin; i < piece_end; i += kReductionChunk) {
      const int64_t chunk_end = i + kReductionChunk < piece_end ? i + kReductionChunk : piece_end;
      double* sums = squares + (first_chunk[index] + i / kReductionChunk) * kMeasured;
      DSX_DISPATCH_ISA(isa, step(call.types, tensor, constants, i, chunk_end, sums));
    }
  };
  for_each_piece<kReductionChunk>(tensor_begin, count, begin, end, visit);
}

}  // namespace dsx
