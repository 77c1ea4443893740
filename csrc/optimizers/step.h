// What every optimizer step is made of: tensors, how they are stored, options that may be on the
// device, and the constants of one tensor's step. An optimizer adds its formula as a Rule:
//
//   struct Rule {
//     static constexpr const char* kOp;            // name of the op
//     static constexpr const char* kStateNames[];  // of the arguments that are state, in order
//     static constexpr int kStates;                // how many, those that may be absent included
//     static constexpr int kRequiredStates;        // the first ones: all others may be absent
//     static constexpr int kUsualStates;           // how many most calls have
//     static constexpr bool is_signed(int j);      // whether values of state j may be negative
//     struct Options;                              // numbers that hold for all tensors
//     struct Constants;                            // what the loop needs of them; from double
//
//     // Reads the options from the op's arguments, in their order, and checks them.
//     template <class Numbers> static Options read_options(Numbers& in);
//     static Constants make_constants(const Options&, double lr, double grad_divisor,
//                                     float step_count);
//     static void leave_out_optional_states(Constants&);  // if it has more than the usual ones
//   };
//   template <class Float> void update(const Rule::Constants&, Float grad, Float& param,
//                                      Float (&states)[kStates]);  // in <rule>_math.inl
//
// An optimizer that needs a number of each whole tensor (a norm) before it can update has two
// rules, one for each pass over memory; each says which by its `static constexpr Pass kPass`. One
// that measures also has, beside update:
//
//   template <class Float> void measure(const Rule::Constants&, Float grad, Float param,
//                                       const Float (&states)[kStates],  // as they were stored
//                                       Float (&values)[kMeasured]);     // squares are added up
//
// The other one has `static constexpr bool kHasCoefficients = true`: a factor of lr for each
// tensor.
#pragma once

#include <cstdint>
#include <type_traits>

#include "optimizers/scalar.h"
#include "common/simd/isa.h"
#include "common/noise.h"
#include "optimizers/storage.h"

namespace dsx {

// The memory of one parameter and its state, all in the memory order of the parameter.
template <int kStates>
struct StepMemory {
  void* param;             // [n] as the model has it
  void* master;            // [n] its float32 original, or its lower halves; null: there is none
  void* states[kStates];   // [n] each; null: absent
  float* scales[kStates];  // [ceil(n / kCodesBlock)] each: of states stored as codes
  float* step_count;       // [1] steps taken; null if the rule knows none

  // What is updated: the float32 original if there is one; of a split weight the upper halves.
  DSX_HOST_DEVICE void* weight(Format format) const {
    return master != nullptr && format != Format::split ? master : param;
  }
};

// One parameter in a step. What is written is the very memory of what is read, or shares no byte
// with anything else in the list.
template <int kStates>
struct StepTensor {
  StepMemory<kStates> source;  // read
  StepMemory<kStates> target;  // written
  void* grad;                  // [n] read; null if the rule reads none
  NoiseKey noise;
  int64_t n;
};

struct StepTypes {  // of all tensors of a call
  Format weight;    // what is updated: param, its float32 master, or both halves
  Dtype grad;
  Format state;
  Dtype param;
  int states;  // bit j: state j is there

  DSX_HOST_DEVICE constexpr bool has_state(int j) const { return (states >> j & 1) != 0; }
};

constexpr int first_states(int count) { return (1 << count) - 1; }

// What a rule does in its pass over memory.
enum class Pass {
  whole,    // reads gradients; writes weights and states; the only pass of most optimizers
  norms,    // reads weights and gradients; adds up squares of each tensor, knows no step counts
  moments,  // the same, and writes states
  apply,    // reads states; writes weights; the step counts have been advanced before
};

DSX_HOST_DEVICE constexpr bool measures(Pass pass) {
  return pass == Pass::norms || pass == Pass::moments;
}
DSX_HOST_DEVICE constexpr bool writes_states(Pass pass) {
  return pass == Pass::whole || pass == Pass::moments;
}
DSX_HOST_DEVICE constexpr bool advances_step_counts(Pass pass) { return writes_states(pass); }
DSX_HOST_DEVICE constexpr bool reads_step_counts(Pass pass) { return pass != Pass::norms; }
DSX_HOST_DEVICE constexpr bool reads_grads(Pass pass) { return pass != Pass::apply; }
DSX_HOST_DEVICE constexpr bool writes_weights(Pass pass) {
  return pass == Pass::whole || pass == Pass::apply;
}

constexpr int kMeasured = 2;  // sums of squares of each tensor

template <class Rule>
DSX_HOST_DEVICE constexpr Pass pass_of() {
  if constexpr (requires { Rule::kPass; }) {
    return Rule::kPass;
  } else {
    return Pass::whole;
  }
}

template <class Rule>
constexpr bool has_coefficients() {
  if constexpr (requires { Rule::kHasCoefficients; }) {
    return Rule::kHasCoefficients;
  } else {
    return false;
  }
}

template <class Rule>
struct StepCall {
  typename Rule::Options options;
  Scalar lr;
  Scalar grad_scale;  // gradients are divided by it first
  Scalar found_inf;   // not 0: the step is skipped, what is written is what was read
  bool maximize;      // steps up the gradient
  StepTypes types;
  bool in_place;                        // of every tensor source and target are the same
  const float* coefficients = nullptr;  // [tensors] factor of lr for each; or null
};

template <class Rule>
struct TensorConstants {  // what depends on the tensor's step count
  typename Rule::Constants constants;
  Noise noise;
};

// `step_count` has this step in it: of the first one it is 1. Same bits on the host and in CUDA.
template <class Rule>
DSX_HOST_DEVICE TensorConstants<Rule> constants_of(const StepCall<Rule>& call, int64_t index,
                                                   const NoiseKey& key, float step_count) {
  const double scale = call.grad_scale.value();
  const double divisor = call.maximize ? -scale : scale;
  double lr = call.lr.value();
  if (call.coefficients != nullptr) lr *= call.coefficients[index];
  return {Rule::make_constants(call.options, lr, divisor, step_count), make_noise(key, step_count)};
}

// The storage types that have a CUDA loop of their own: Weight, Grad, State. Every other
// combination, and any number of states other than the usual one, runs a loop with Any, which
// chooses the conversion at run time, vector by vector. The CPU's loops are in step_cpu.inl.
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
template <class Rule, class Weight, class Grad, class State>
constexpr bool takes(const StepTypes& types) {
  return holds<Weight>(types.weight) && holds<Grad>(types.grad) && holds<State>(types.state) &&
         (std::is_same_v<Grad, Any> || types.states == first_states(Rule::kUsualStates));
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
DSX_HOST_DEVICE typename Rule::Constants constants_of_loop(typename Rule::Constants constants) {
  if constexpr (StatesOfLoop<Rule, Grad>::kUsual && Rule::kUsualStates < Rule::kStates) {
    Rule::leave_out_optional_states(constants);
  }
  return constants;
}

// The kernels of every rule, which step_cpu.cpp and step_cuda.cu are compiled to.

// Updates elements [begin, end) of the row that the tensors form (optimizers/chunks.h), whose step
// counts have been advanced; found_inf is not looked at. Disjoint ranges may run on different
// threads; the result does not depend on how the row is cut. Never throws.
template <class Rule>
void step_cpu(Isa isa, const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
              const int64_t* tensor_begin,  // [count + 1]
              int64_t count, int64_t begin, int64_t end);

// The same for a rule that measures: also writes, for each chunk of kReductionChunk elements, the
// sums of squares.
template <class Rule>
void measure_cpu(Isa isa, const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
                 const int64_t* tensor_begin,  // [count + 1]
                 const int64_t* first_chunk,   // [count + 1] of each tensor, then the end
                 int64_t count, int64_t begin, int64_t end,
                 double* squares);  // [first_chunk[count], kMeasured]

// Queues the step of all tensors on the stream (cudaStream_t), on the current device: advances
// their step counts and updates them. If found_inf says skip, what is written is what was read.
// Throws if a launch fails.
template <class Rule>
void step_cuda(const StepCall<Rule>& call,
               const StepTensor<Rule::kStates>* tensors,  // [count] host memory
               int64_t count,
               TensorConstants<Rule>* constants,  // [count] device memory to work in
               void* stream);

// The same for a rule that measures; the squares are 0 if found_inf says skip.
template <class Rule>
void measure_cuda(const StepCall<Rule>& call,
                  const StepTensor<Rule::kStates>* tensors,  // [count] host memory
                  int64_t count,
                  TensorConstants<Rule>* constants,  // [count] device memory to work in
                  double* workspace,                 // [measure_cuda_workspace()] the same
                  double* squares,                   // [count, kMeasured] device memory, written
                  void* stream);

// How many doubles of device memory measure_cuda works in, at the most.
template <class Rule>
int64_t measure_cuda_workspace(const StepTensor<Rule::kStates>* tensors, int64_t count);

}  // namespace dsx
