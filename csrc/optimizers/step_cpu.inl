// The loops of an optimizer step over one tensor; compiled once per ISA, after the Rule's formula.
// Memory goes on to the end of the last line: tails are padded.
#include DSX_FORMULA
#include "common/simd/copy_row.inl"
#include "common/simd/sum.inl"
#include "optimizers/blocks_cpu.inl"
#include "optimizers/storage_cpu.inl"

static_assert(kStepLine == kLine);

// Elements [begin, end) of one tensor of the usual states in one pass, for the storage types that
// most calls have. Flat, with all that it calls in one function: left to itself, GCC calls parts of
// it for each vector, and half the time goes into that.
template <class Rule, class Weight, class Grad, class State>
__attribute__((flatten)) void step_vectors(const StepTypes& types,
                                           const StepTensor<Rule::kStates>& tensor,
                                           const TensorConstants<Rule>& of_tensor, int64_t begin,
                                           int64_t end) {
  constexpr Pass pass = pass_of<Rule>();
  // Local copies, which no store below can change: they stay in registers.
  const typename Rule::Constants constants = constants_of_loop<Rule, Grad>(of_tensor.constants);
  const Parameter<Weight> parameter(types, tensor.source, tensor.target);
  const auto grads = Pointer<Grad>::to(tensor.grad, types.grad);
  const States<Rule, State> states(types, tensor, of_tensor.noise);
  const auto ask = [&](int64_t i) {
    if (i >= end - kPrefetchElements) return;
    if constexpr (reads_grads(pass)) prefetch((grads + i).address);
    parameter.ask_for(i);
    states.ask_for(i);
  };
  for_each_whole_line(begin, end, ask, [&](int64_t i) {
    Vec grad = 0;
    if constexpr (reads_grads(pass)) grad = Vec::load(grads + i, Vec::size);
    Vec param = parameter.load(i);
    Vec values[Rule::kStates]{};
    states.load(i, values);
    update(constants, grad, param, values);
    parameter.store(i, param);
    if constexpr (writes_states(pass)) states.store(i, values);
  });
}

// The same for all storage types, and for a rule that measures, which adds to `sums`: block by
// block, first the new state is stored, then the values are worked out from what was.
template <class Rule, class... Sums>
void step_blocks(const StepTypes& types, const StepTensor<Rule::kStates>& tensor,
                 const TensorConstants<Rule>& of_tensor, int64_t begin, int64_t end,
                 Sums&... sums) {
  constexpr Pass pass = pass_of<Rule>();
  const auto usual_constants = constants_of_loop<Rule, float>(of_tensor.constants);
  Blocks<Rule> blocks(types, tensor, of_tensor.noise);
  for (int64_t first = begin; first < end; first += kCodesBlock) {
    const int64_t last = first + kCodesBlock < end ? first + kCodesBlock : end;
    blocks.unpack_all(first, last);
    if constexpr (pass != Pass::norms) {
      if (types.states == first_states(Rule::kUsualStates)) {
        update_block<Rule, true>(usual_constants, blocks, last - first);
      } else if constexpr (Rule::kRequiredStates < Rule::kStates) {
        update_block<Rule, false>(of_tensor.constants, blocks, last - first);
      }
    }
    if constexpr (writes_weights(pass)) blocks.pack_weight(first, last);
    if constexpr (writes_states(pass)) blocks.pack_states(first, last);
    if constexpr (measures(pass)) {
      if (writes_states(pass)) blocks.unpack_renewed_states(first, last);
      (measure_block(of_tensor.constants, blocks, first - begin, last - first, sums), ...);
    }
  }
}

// The loop for the storage types of the call.
template <class Rule, class... Sums>
void step_lines(const StepTypes& types, const StepTensor<Rule::kStates>& tensor,
                const TensorConstants<Rule>& of_tensor, int64_t begin, int64_t end, Sums&... sums) {
  if constexpr (!measures(pass_of<Rule>())) {
#define DSX_TRY_TYPES(Weight, Grad, State)                                                \
  if (takes<Rule, Weight, Grad, State>(types)) {                                          \
    return step_vectors<Rule, Weight, Grad, State>(types, tensor, of_tensor, begin, end); \
  }
    DSX_TRY_TYPES(float, float, float)
    DSX_TRY_TYPES(float, BFloat16, float)
    DSX_TRY_TYPES(BFloat16, BFloat16, BFloat16)
#undef DSX_TRY_TYPES
  }
  step_blocks(types, tensor, of_tensor, begin, end, sums...);
}

// Elements [begin, end) of one tensor; begin is a multiple of kCodesBlock, and end too, or the
// tensor's.
template <class Rule, class... Sums>
void step_padded(const StepTypes& types, const StepTensor<Rule::kStates>& tensor,
                 const TensorConstants<Rule>& of_tensor, int64_t begin, int64_t end,
                 Sums&... sums) {
  const int64_t whole = end - end % Padded<Rule>::unit_of(types.state);
  if (begin < whole) step_lines(types, tensor, of_tensor, begin, whole, sums...);
  if (whole < end) {
    Padded<Rule> last(types, tensor, whole);
    const TensorConstants<Rule> of_last{of_tensor.constants, noise_from(of_tensor.noise, whole)};
    step_lines(types, last.tensor, of_last, 0, end - whole, sums...);
    last.store();
  }
}

template <class Rule>
void step_range(const StepTypes& types, const StepTensor<Rule::kStates>& tensor,
                const TensorConstants<Rule>& of_tensor, int64_t begin, int64_t end) {
  Streamed<Rule> streamed(types, tensor);
  if (streamed.is_worth_it()) {
    for (; end - begin >= kStreamedElements; begin += kStreamedElements) {
      const TensorConstants<Rule> of_part{of_tensor.constants, noise_from(of_tensor.noise, begin)};
      step_lines(types, streamed.part(begin), of_part, 0, kStreamedElements);
      streamed.store(begin, copy_past_cache);
    }
    end_past_cache();
  }
  step_padded(types, tensor, of_tensor, begin, end);
}

// The same for a rule that measures: the sums of the squares of the range, a chunk of
// kReductionChunk.
template <class Rule>
void step_range(const StepTypes& types, const StepTensor<Rule::kStates>& tensor,
                const TensorConstants<Rule>& of_tensor, int64_t begin, int64_t end,
                double* squares) {
  Sum16 sums[kMeasured];
  step_padded(types, tensor, of_tensor, begin, end, sums);
  for (int k = 0; k < kMeasured; ++k) squares[k] = sums[k].total();
}
