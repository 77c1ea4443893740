// Registers the ops of one optimizer: DSX_RULE, and DSX_MEASURING_RULE if it has two, which
// DSX_RULE_HEADER declares; the row in op_builder/registry.py defines all three. Their schemas are
// in deepspeed_ext/ops/optimizers. Compiled once for each device.
#include DSX_RULE_HEADER

#include "optimizers/step_call_ops.h"
#ifdef USE_CUDA
#include "optimizers/step_ops_cuda.h"
#else
#include "optimizers/step_ops_cpu.h"
#endif

namespace dsx {
namespace {

#ifdef USE_CUDA
using Device = Cuda;
#else
using Device = Cpu;
#endif

// The arguments of a call, one after the other.
class Stack {
 public:
  Stack(const StableIValue* values, size_t count) : values_(values), count_(count) {}

  template <class T>
  T next() {
    STD_TORCH_CHECK(next_ < count_, "the schema has ", count_, " arguments, expected more");
    return unbox<T>(values_[next_++]);
  }
  Stack all_but(size_t count) {  // skips those before the last ones, and returns them
    STD_TORCH_CHECK(count <= left(), "the schema has ", count_, " arguments, expected more");
    const Stack skipped(values_ + next_, left() - count);
    next_ = count_ - count;
    return skipped;
  }
  size_t left() const { return count_ - next_; }

 private:
  const StableIValue* values_;
  size_t count_, next_ = 0;
};

// The options of a step, which a Rule reads in the order of the schema.
template <class Rule>
class Numbers {
 public:
  Numbers(const Stack& values, const StepLists<Rule::kStates>& lists)
      : values_(values), lists_(lists) {}

  double number() { return values_.next<double>(); }
  bool flag() { return values_.next<bool>(); }

  double decay_rate(const char* name) {
    const double rate = number();
    check(rate >= 0 && rate < 1, Rule::kOp, ": ", name, " is ", rate, ", expected 0 <= ", name,
          " < 1");
    return rate;
  }
  double at_least_0(const char* name) {
    const double value = number();
    check(value >= 0, Rule::kOp, ": ", name, " is ", value, ", expected at least 0");
    return value;
  }

  bool has_state(int j) const { return !lists_.source.states[j].empty(); }

  // State j is given if and only if it is wanted.
  void expect_state(int j, bool wanted) const {
    const size_t length = lists_.offsets.has_value() ? 1 : lists_.source.params.size();
    if (has_state(j) != wanted) {
      check_length(Rule::kOp, {Rule::kStateNames[j]}, lists_.source.states[j].size(),
                   wanted ? length : 0);
    }
  }
  void expect_0(const char* name, double value, const char* why) const {
    check(value == 0, Rule::kOp, ": ", name, " is ", value, ", expected 0 ", why);
  }

  void end() const {
    STD_TORCH_CHECK(values_.left() == 0, "the schema has ", values_.left(), " options too many");
  }

 private:
  Stack values_;
  const StepLists<Rule::kStates>& lists_;
};

// What a pass reads, or writes, of the lists.
struct Parts {
  bool params, states, master_weights, step_counts;

  constexpr size_t count(int kinds_of_state) const {
    return (params ? 1 : 0) + (states ? size_t(kinds_of_state) + 1 : 0) + (master_weights ? 1 : 0) +
           (step_counts ? 1 : 0);
  }
};
constexpr Parts parts_read(Pass pass) {
  return {true, pass != Pass::norms, true, reads_step_counts(pass)};
}
constexpr Parts parts_written(Pass pass) {
  return {writes_weights(pass), writes_states(pass), writes_weights(pass),
          advances_step_counts(pass)};
}

template <int kStates>
void take_state(Stack& stack, const Parts& parts, UpdatedLists<kStates>& lists) {
  for (int j = 0; parts.states && j < kStates; ++j) lists.states[j] = stack.next<TensorList>();
  if (parts.states) lists.scales = stack.next<TensorList>();
  if (parts.master_weights) lists.master_params = stack.next<TensorList>();
  if (parts.step_counts) lists.steps = stack.next<TensorList>();
}

// What torch calls for `<op>`, and for `<op>.out`, which writes elsewhere. Which arguments there
// are depends on the pass. All that owns something is taken over before anything is checked.
template <class Rule, bool kInPlace>
void step_op(StableIValue* values, uint64_t arguments, uint64_t results) {
  constexpr Pass pass = pass_of<Rule>();
  constexpr bool kNorms = pass == Pass::norms, kGrads = reads_grads(pass);
  constexpr size_t kLast = kNorms ? 1 : kGrads ? 3 : 1;  // scalars behind the options
  constexpr size_t kOut = kInPlace ? 0 : parts_written(pass).count(Rule::kStates);
  STD_TORCH_CHECK(results == measures(pass), "the schema has ", results, " results, expected ",
                  int(measures(pass)));
  Stack stack(values, arguments);
  StepLists<Rule::kStates> lists;
  StepScalars scalars;
  lists.in_place = kInPlace;
  lists.source.params = stack.next<TensorList>();
  if (kGrads) lists.grads = stack.next<TensorList>();
  take_state(stack, parts_read(pass), lists.source);
  lists.offsets = stack.next<OptionalTensor>();
  lists.slots = stack.next<OptionalTensor>();
  if (writes_states(pass)) lists.noise = stack.next<OptionalTensor>();
  if (has_coefficients<Rule>()) lists.coefficients = stack.next<torch::stable::Tensor>();
  if (writes_weights(pass)) {
    scalars.lr = stack.next<double>();
    scalars.lr_tensor = stack.next<OptionalTensor>();
  }
  Numbers<Rule> numbers(stack.all_but(kLast + kOut), lists);
  if (kGrads && !kNorms) scalars.maximize = stack.next<bool>();
  if (kGrads) scalars.grad_scale = stack.next<OptionalTensor>();
  if (!kNorms) scalars.found_inf = stack.next<OptionalTensor>();
  if (!kInPlace) {
    if (parts_written(pass).params) lists.target.params = stack.next<TensorList>();
    take_state(stack, parts_written(pass), lists.target);
  }
  if constexpr (pass == Pass::whole && !has_coefficients<Rule>()) {
    if (lists.source.params.empty()) {
      return check_length(Rule::kOp, {"grads"}, lists.grads.size(), 0);
    }
  }
  const typename Rule::Options options = Rule::read_options(numbers);
  numbers.end();
  if constexpr (measures(pass)) {
    box(run_step<Rule, Device>(lists, scalars, options), values);
  } else {
    run_step<Rule, Device>(lists, scalars, options);
  }
}

template <class Rule>
void register_rule(torch::stable::detail::StableLibrary& library) {
  library.impl(Rule::kOp, &step_op<Rule, true>);
  if (pass_of<Rule>() == Pass::norms) return;  // writes to no argument
  library.impl((std::string(Rule::kOp) + ".out").c_str(), &step_op<Rule, false>);
}

void register_rules(torch::stable::detail::StableLibrary& library) {
  register_rule<DSX_RULE>(library);
#ifdef DSX_MEASURING_RULE
  register_rule<DSX_MEASURING_RULE>(library);
#endif
}

}  // namespace

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) { register_rules(library); }
#else
STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) { register_rules(library); }
#endif

}  // namespace dsx
