// The CPU kernels of one optimizer: of DSX_RULE, and of DSX_MEASURING_RULE if it has two, which
// DSX_RULE_HEADER declares and DSX_FORMULA has the formulas of. The row in op_builder/registry.py
// defines them. Picks the instruction set and walks a range of the row that the tensors form.
#include <limits>

#include "optimizers/chunks.h"
#include "common/simd/prefetch.h"
#include "optimizers/padded.h"
#include "optimizers/streamed.h"
#include DSX_RULE_HEADER

#define DSX_KERNEL_SOURCE "optimizers/step_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {
namespace {

static_assert(kElementwiseChunk % kCodesBlock == 0 && kReductionChunk % kCodesBlock == 0);

// The constants of one tensor after the other's. Most tensors have taken equally many steps: they
// are worked out once for a run of them.
template <class Rule>
class TensorConstantsCache {
 public:
  explicit TensorConstantsCache(const StepCall<Rule>& call) : call_(call) {}

  const TensorConstants<Rule>& of(const StepTensor<Rule::kStates>& tensor, int64_t index) {
    const float* source = tensor.target.step_count;
    const float step_count = source == nullptr ? 0 : *source;
    if (step_count != step_count_ || call_.coefficients != nullptr) {
      step_count_ = step_count;
      constants_ = constants_of(call_, index, tensor.noise, step_count);
    } else if (tensor.noise.on) {
      constants_.noise = make_noise(tensor.noise, step_count);
    }
    return constants_;
  }

 private:
  const StepCall<Rule>& call_;
  float step_count_ = std::numeric_limits<float>::quiet_NaN();  // equal to no tensor's
  TensorConstants<Rule> constants_{};
};

}  // namespace

template <class Rule>
void step_cpu(Isa isa, const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
              const int64_t* tensor_begin, int64_t count, int64_t begin, int64_t end) {
  TensorConstantsCache<Rule> cache(call);
  const auto visit = [&](int64_t index, int64_t piece_begin, int64_t piece_end) {
    const StepTensor<Rule::kStates>& tensor = tensors[index];
    const TensorConstants<Rule>& constants = cache.of(tensor, index);
    DSX_DISPATCH_ISA(isa, step_range(call.types, tensor, constants, piece_begin, piece_end));
  };
  for_each_piece<kElementwiseChunk>(tensor_begin, count, begin, end, visit);
}

template <class Rule>
void measure_cpu(Isa isa, const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
                 const int64_t* tensor_begin, const int64_t* first_chunk, int64_t count,
                 int64_t begin, int64_t end, double* squares) {
  TensorConstantsCache<Rule> cache(call);
  const auto visit = [&](int64_t index, int64_t piece_begin, int64_t piece_end) {
    const StepTensor<Rule::kStates>& tensor = tensors[index];
    const TensorConstants<Rule>& constants = cache.of(tensor, index);
    for (int64_t i = piece_begin; i < piece_end; i += kReductionChunk) {
      const int64_t chunk_end = i + kReductionChunk < piece_end ? i + kReductionChunk : piece_end;
      double* sums = squares + (first_chunk[index] + i / kReductionChunk) * kMeasured;
      DSX_DISPATCH_ISA(isa, step_range(call.types, tensor, constants, i, chunk_end, sums));
    }
  };
  for_each_piece<kReductionChunk>(tensor_begin, count, begin, end, visit);
}

template void step_cpu(Isa, const StepCall<DSX_RULE>&, const StepTensor<DSX_RULE::kStates>*,
                       const int64_t*, int64_t, int64_t, int64_t);
#ifdef DSX_MEASURING_RULE
template void measure_cpu(Isa, const StepCall<DSX_MEASURING_RULE>&,
                          const StepTensor<DSX_MEASURING_RULE::kStates>*, const int64_t*,
                          const int64_t*, int64_t, int64_t, int64_t, double*);
#endif

}  // namespace dsx
