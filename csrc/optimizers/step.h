// What every optimizer step is made of: tensors, their storage types, options that may be on the
// device, and the constants of one tensor's step. An optimizer adds its formula as a Rule:
//
//   struct Rule {
//     static constexpr const char* kOp;         // name of the op, for errors
//     static constexpr int kStates;             // state tensors, those that may be absent included
//     static constexpr int kRequiredStates;     // the first ones: all others may be absent
//     static constexpr int kUsualStates;        // how many most calls have
//     static constexpr bool is_signed(int j);   // whether values of state j may be negative
//     struct Options;                           // numbers that hold for all tensors, with lr
//     struct Step;                              // what the loop needs of them; from double
//
//     static Step make_step(const Options&, double lr, double grad_divisor, float step);
//   };
//   template <class Float> void update(const Rule::Step&, Float grad, Float& param,
//                                      Float (&states)[kStates]);  // in <rule>_math.inl
//
// An optimizer that needs a number of each whole tensor (a norm) before it can update has two
// rules, one for each pass over memory; each says which by its `static constexpr Pass kPass`. One
// that measures also has, beside update:
//
//   template <class Float> void measure(const Rule::Step&, Float grad, Float param,
//                                       const Float (&states)[kStates],  // as they were stored
//                                       Float (&values)[kMeasured]);     // squares are added up
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/pointer.h"
#include "common/scalar.h"
#include "optimizers/noise.h"

namespace dsx {

// One parameter with its gradient and state, all in the memory order of the parameter. What is
// written overlaps nothing else in the list.
template <int kStates>
struct StepTensor {
  void* param;             // [n] updated
  void* grad;              // [n] read only; null if the rule reads none
  void* states[kStates];   // [n] each, updated; absent ones come last and are null
  float* scales[kStates];  // [ceil(n / kCodesBlock)] each, updated: of states stored as codes
  void* param_copy;  // [n] receives the new param, rounded; or null. Of a split param: lower halves
  float* step;       // [1] steps taken; null if the rule knows none
  NoiseKey noise;
  int64_t n;
};

struct StepTypes {  // of all tensors of a call
  Dtype param, grad, state, param_copy;
  int states;  // how many there are; the others are absent
};

// What a rule does in its pass over memory.
enum class Pass {
  step,     // reads gradients; writes params and states; the only pass of most optimizers
  measure,  // reads params and gradients; adds up squares of each tensor, knows no steps
  prepare,  // the same, and writes states
  apply,    // reads states; writes params; the steps have been advanced before
};

DSX_HOST_DEVICE constexpr bool measures(Pass pass) {
  return pass == Pass::measure || pass == Pass::prepare;
}
DSX_HOST_DEVICE constexpr bool advances_steps(Pass pass) {
  return pass == Pass::step || pass == Pass::prepare;
}
DSX_HOST_DEVICE constexpr bool reads_grads(Pass pass) { return pass != Pass::apply; }
DSX_HOST_DEVICE constexpr bool writes_params(Pass pass) {
  return pass == Pass::step || pass == Pass::apply;
}
DSX_HOST_DEVICE constexpr bool writes_states(Pass pass) { return advances_steps(pass); }

constexpr int kMeasured = 2;  // sums of squares of each tensor

template <class Rule>
DSX_HOST_DEVICE constexpr Pass pass_of() {
  if constexpr (requires { Rule::kPass; }) {
    return Rule::kPass;
  } else {
    return Pass::step;
  }
}

template <class Rule>
struct StepCall {
  typename Rule::Options options;
  Scalar lr;
  Scalar grad_scale;  // gradients are divided by it first
  Scalar found_inf;   // not 0: the step is skipped, nothing is modified
  bool maximize;      // steps up the gradient
  StepTypes types;
  const float* coefficients = nullptr;  // [tensors] factor of lr for each; or null
};

template <class Rule>
struct Prepared {  // what depends on the tensor's step
  typename Rule::Step step;
  Noise noise;
};

// `step` counts this step as taken: the first is 1. Same bits on the host and in CUDA.
template <class Rule>
DSX_HOST_DEVICE Prepared<Rule> prepare(const StepCall<Rule>& call, int64_t index,
                                       const NoiseKey& key, float step) {
  const double scale = call.grad_scale.value();
  const double divisor = call.maximize ? -scale : scale;
  double lr = call.lr.value();
  if (call.coefficients != nullptr) lr *= call.coefficients[index];
  return {Rule::make_step(call.options, lr, divisor, step), make_noise(key, step)};
}

// The storage types that have a loop of their own: Param, Grad, State. Every other combination, and
// any number of states other than the usual one, runs a loop with Any, which chooses the conversion
// at run time, vector by vector.
#define DSX_STEP_STORAGE_TYPES(APPLY) \
  APPLY(float, float, float)          \
  APPLY(float, BFloat16, float)       \
  APPLY(BFloat16, BFloat16, BFloat16) \
  APPLY(Split, BFloat16, Codes)       \
  APPLY(Split, Any, Any)              \
  APPLY(Split, Any, Codes)            \
  APPLY(Any, Any, Codes)              \
  APPLY(Any, Any, Any)

// Whether the loop of these types can do the call, and how many states it reckons with.
template <class Rule, class Param, class Grad, class State>
constexpr bool takes(const StepTypes& types) {
  return holds<Param>(types.param) && holds<Grad>(types.grad) && holds<State>(types.state) &&
         (std::is_same_v<Grad, Any> || types.states == Rule::kUsualStates);
}

// The states that a loop reckons with: the usual ones, or all there may be.
template <class Rule, class Grad>
struct StatesOfLoop {
  static constexpr bool kUsual = !std::is_same_v<Grad, Any>;
  static constexpr int kCount = kUsual ? Rule::kUsualStates : Rule::kStates;

  DSX_HOST_DEVICE static bool absent(const void* state) { return !kUsual && state == nullptr; }
};

// The constants as such a loop needs them: without the usual states being known, the compiler would
// keep room for the others.
template <class Rule, class Grad>
DSX_HOST_DEVICE typename Rule::Step constants_of_loop(typename Rule::Step step) {
  if constexpr (StatesOfLoop<Rule, Grad>::kUsual && Rule::kUsualStates < Rule::kStates) {
    Rule::leave_out_optional_states(step);
  }
  return step;
}

}  // namespace dsx
