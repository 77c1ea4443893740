// The loops of an optimizer step over one tensor; compiled once per ISA, after the Rule's formula.
#include DSX_FORMULA
#include "common/simd/sum.inl"
#include "optimizers/storage_cpu.inl"

// Elements [begin, end) of one tensor; begin is a multiple of kCodesBlock.
template <class Rule, class Param, class Grad, class State>
inline void step_loop(const StepTypes& types, const StepTensor<Rule::kStates>& tensor,
                      const TensorConstants<Rule>& of_tensor, int64_t begin, int64_t end) {
  constexpr Pass pass = pass_of<Rule>();
  constexpr bool kCoded = holds<State>(Format::codes);
  // Local copies, which no store below can change: they stay in registers.
  const typename Rule::Constants constants = constants_of_loop<Rule, Grad>(of_tensor.constants);
  const Parameter<Param> parameter(types, tensor.source, tensor.target);
  const auto grads = Pointer<Grad>::to(tensor.grad, types.grad);
  const auto run = [&](auto& states, int64_t first, int64_t last) {
    const auto ask = [&](int64_t i) {
      if constexpr (!kCoded) {  // codes leave the processor the time to see to it
        if (i >= end - kPrefetchElements) return;
        if constexpr (reads_grads(pass)) prefetch((grads + i).address);
        parameter.ask_for(i);
        states.ask_for(i);
      }
    };
    for_each_line(first, last, ask, [&](int64_t i, int count) {
      Vec grad = 0;
      if constexpr (reads_grads(pass)) grad = Vec::load(grads + i, count);
      Vec param = parameter.load(i, count);
      Vec values[Rule::kStates]{};
      states.load(i, count, values);
      update(constants, grad, param, values);
      parameter.store(i, param, count);
      if constexpr (writes_states(pass)) states.store(i, count, values);
    });
  };
  if constexpr (kCoded) {
    float buffers[StatesOfLoop<Rule, Grad>::kCount][kCodesBlock];
    CodedStates<Rule, Grad> states(tensor, of_tensor.noise, buffers);
    for (int64_t block = begin; block < end; block += kCodesBlock) {
      const int64_t block_end = block + kCodesBlock < end ? block + kCodesBlock : end;
      states.begin_block(block);
      run(states, block, block_end);
      if constexpr (writes_states(pass)) states.end_block(block, block_end);
    }
  } else {
    const States<Rule, State, Grad> states(types, tensor, of_tensor.noise);
    run(states, begin, end);
  }
}

// The same for a rule that measures: adds up the squares of the range, a chunk of kReductionChunk.
// Block by block, first the new state is stored, then the values are worked out from what was.
template <class Rule, class Param, class Grad, class State>
inline void measure_loop(const StepTypes& types, const StepTensor<Rule::kStates>& tensor,
                         const TensorConstants<Rule>& of_tensor, int64_t begin, int64_t end,
                         double* squares) {
  constexpr Pass pass = pass_of<Rule>();
  constexpr bool kCoded = holds<State>(Format::codes);
  const typename Rule::Constants constants = constants_of_loop<Rule, Grad>(of_tensor.constants);
  const Parameter<Param> parameter(types, tensor.source, tensor.target);
  const auto grads = Pointer<Grad>::to(tensor.grad, types.grad);
  Sum16 sums[kMeasured];
  [[maybe_unused]] const auto renew = [&](auto& states, int64_t first, int64_t last) {
    const auto ask = [&](int64_t i) {
      if constexpr (!kCoded) {
        if (i >= end - kPrefetchElements) return;
        prefetch((grads + i).address);
        parameter.ask_for(i);
        states.ask_for(i);
      }
    };
    for_each_line(first, last, ask, [&](int64_t i, int count) {
      const Vec grad = Vec::load(grads + i, count);
      Vec param = parameter.load(i, count);
      Vec values[Rule::kStates]{};
      states.load(i, count, values);
      update(constants, grad, param, values);
      states.store(i, count, values);
    });
  };
  const auto add_up = [&](const auto& states, int64_t first, int64_t last) {
    for_each_vector(first, last, [&](int64_t i, int count) {
      const Vec grad = Vec::load(grads + i, count);
      const Vec param = parameter.load(i, count);
      Vec values[Rule::kStates]{};
      states.load(i, count, values);
      Vec measured[kMeasured];
      measure(constants, grad, param, values, measured);
      for (int k = 0; k < kMeasured; ++k) sums[k].add_square(measured[k], i - begin, count);
    });
  };
  StepTensor<Rule::kStates> stored = tensor;  // whose state is what has been stored
  stored.source = tensor.target;
  [[maybe_unused]] float buffers[StatesOfLoop<Rule, Grad>::kCount][kCodesBlock];
  for (int64_t block = begin; block < end; block += kCodesBlock) {
    const int64_t block_end = block + kCodesBlock < end ? block + kCodesBlock : end;
    if constexpr (kCoded) {
      CodedStates<Rule, Grad> states(tensor, of_tensor.noise, buffers);
      states.begin_block(block);
      renew(states, block, block_end);
      states.end_block(block, block_end);
      CodedStates<Rule, Grad> new_states(stored, of_tensor.noise, buffers);
      new_states.begin_block(block);
      add_up(new_states, block, block_end);
    } else {
      const States<Rule, State, Grad> states(types, tensor, of_tensor.noise);
      if constexpr (writes_states(pass)) renew(states, block, block_end);
      add_up(States<Rule, State, Grad>(types, stored, of_tensor.noise), block, block_end);
    }
  }
  for (int k = 0; k < kMeasured; ++k) squares[k] = sums[k].total();
}

// One of the two for these storage types.
template <class Rule, class Param, class Grad, class State, class... Squares>
inline void loop(const StepTypes& types, const StepTensor<Rule::kStates>& tensor,
                 const TensorConstants<Rule>& of_tensor, int64_t begin, int64_t end,
                 Squares... squares) {
  if constexpr (measures(pass_of<Rule>())) {
    measure_loop<Rule, Param, Grad, State>(types, tensor, of_tensor, begin, end, squares...);
  } else {
    step_loop<Rule, Param, Grad, State>(types, tensor, of_tensor, begin, end);
  }
}

// The same with all that it calls in one function: left to itself, GCC calls parts of it for each
// vector, and half the time goes into that. Of storage types that are known at run time there would
// be too much of it.
template <class Rule, class Param, class Grad, class State, class... Squares>
__attribute__((flatten)) void flat_loop(const StepTypes& types,
                                        const StepTensor<Rule::kStates>& tensor,
                                        const TensorConstants<Rule>& of_tensor, int64_t begin,
                                        int64_t end, Squares... squares) {
  loop<Rule, Param, Grad, State>(types, tensor, of_tensor, begin, end, squares...);
}

// The loop for the storage types of the call. `squares` is for a rule that measures.
template <class Rule, class... Squares>
void step_range(const StepTypes& types, const StepTensor<Rule::kStates>& tensor,
                const TensorConstants<Rule>& of_tensor, int64_t begin, int64_t end,
                Squares... squares) {
#define DSX_TRY_TYPES(Param, Grad, State)                                                      \
  if (takes<Rule, Param, Grad, State>(types)) {                                                \
    if constexpr (measures(pass_of<Rule>()) || std::is_same_v<Grad, Any>) {                    \
      return loop<Rule, Param, Grad, State>(types, tensor, of_tensor, begin, end, squares...); \
    } else {                                                                                   \
      return flat_loop<Rule, Param, Grad, State>(types, tensor, of_tensor, begin, end,         \
                                                 squares...);                                  \
    }                                                                                          \
  }
  DSX_STEP_STORAGE_TYPES(DSX_TRY_TYPES)
#undef DSX_TRY_TYPES
}
