// From the arguments of a step op to the call of its kernel, the same way for every optimizer.
#pragma once

#include "optimizers/step.h"
#include "optimizers/step_ops.h"

namespace dsx {

using OptionalTensor = std::optional<torch::stable::Tensor>;

struct NamedList {
  const char* name;
  const TensorList& tensors;
};

// The arguments that every step op has: lists of tensors, or slabs of state.
template <int kStates>
struct StepLists {
  const TensorList& params;
  const TensorList& grads;
  NamedList states[kStates];
  const TensorList& scales;
  const TensorList& master_params;
  const TensorList& steps;
  const OptionalTensor& offsets;
  const OptionalTensor& slots;
  const OptionalTensor& noise;
};

struct StepScalars {
  double lr;
  const OptionalTensor& lr_tensor;
  const OptionalTensor& grad_scale;
  const OptionalTensor& found_inf;
  bool maximize;
  const torch::stable::Tensor* coefficients = nullptr;  // factor of lr for each parameter; or null
};

// How state is stored. Throws if parameters of this dtype cannot have it.
inline Dtype state_dtype(const char* op, const Item& item, const TensorView& view, Dtype param) {
  for (Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::codes, param}) {
    if (view.dtype == torch_code(dtype)) return dtype;
  }
  check(false, op, ": ", item, " is ", DtypeCode{view.dtype}, ", expected float32, bfloat16",
        param == Dtype::float16 ? ", float16" : "", " or uint8");
  return {};
}

// How parameters are stored, with their masters if there are any.
inline Dtype param_dtype(const char* op, const TensorList& master_params, Dtype param) {
  if (master_params.empty()) return param;
  const Item item{"params", 0};
  if (TensorView(master_params[0]).dtype == torch_code(Dtype::split)) {
    check(param == Dtype::bfloat16, op, ": ", item, " is ", param,
          ", expected bfloat16 with master_params of int16");
    return Dtype::split;
  }
  check(param != Dtype::float32, op, ": ", item, " is ", param,
        ", expected bfloat16 or float16 with master_params");
  return Dtype::float32;
}

// Where everything lies that has a part for each parameter.
template <int kStates>
struct StepPlaces {
  State states[kStates], scales[kStates], masters, steps;
};

// Checks what a step reads and writes beside parameters and gradients; completes the types.
template <class Rule>
StepPlaces<Rule::kStates> take_state(StepArguments& arguments,
                                     const StepLists<Rule::kStates>& lists, StepTypes& types) {
  constexpr const char* op = Rule::kOp;
  StepPlaces<Rule::kStates> places;
  while (types.states < Rule::kStates &&
         (types.states < Rule::kRequiredStates || !lists.states[types.states].tensors.empty())) {
    ++types.states;
  }
  for (int j = 0; j < types.states; ++j) {
    const auto& [name, tensors] = lists.states[j];
    if (j == 0 && !tensors.empty()) {
      types.state = state_dtype(op, {name, 0}, TensorView(tensors[0]), types.param_copy);
    }
    places.states[j] = arguments.state(name, tensors, types.state);
  }
  const bool coded = types.states > 0 && types.state == Dtype::codes;
  if (!coded) check_length(op, "scales", lists.scales.size(), 0);
  for (int j = 0; coded && j < types.states; ++j) {
    places.scales[j] = arguments.scales(lists.scales, size_t(j), size_t(types.states));
  }
  const Dtype master = types.param == Dtype::split ? Dtype::split : Dtype::float32;
  if (!lists.master_params.empty()) {
    places.masters = arguments.state("master_params", lists.master_params, master);
  }
  if (pass_of<Rule>() != Pass::measure) places.steps = arguments.steps("steps", lists.steps);
  return places;
}

// The tensors of a call as its kernel takes them.
template <int kStates>
std::vector<StepTensor<kStates>> list_tensors(const StepArguments& arguments,
                                              const StepPlaces<kStates>& places,
                                              const Integers64& noise, const StepTypes& types,
                                              bool has_masters) {
  std::vector<StepTensor<kStates>> tensors(arguments.count());
  for (size_t i = 0; i < tensors.size(); ++i) {
    StepTensor<kStates>& tensor = tensors[i];
    const bool wide = types.param == Dtype::float32 && has_masters;
    tensor.param = wide ? places.masters[i] : arguments.param(i);
    tensor.param_copy = types.param == Dtype::split ? places.masters[i]
                        : has_masters               ? arguments.param(i)
                                                    : nullptr;
    tensor.grad = arguments.grad(i);
    for (int j = 0; j < types.states; ++j) {
      tensor.states[j] = places.states[j][i];
      tensor.scales[j] = static_cast<float*>(places.scales[j][i]);
    }
    tensor.step = static_cast<float*>(places.steps[i]);
    if (!noise.empty()) tensor.noise = {uint64_t(noise[2 * i]), noise[2 * i + 1], true};
    tensor.n = arguments.numel(i);
  }
  return tensors;
}

// Checks everything, then hands the call and its tensors to Device::run, or, of a rule that
// measures, to Device::measure, and returns the squares.
template <class Rule, class Device>
auto run_step(const StepLists<Rule::kStates>& lists, const StepScalars& scalars,
              const typename Rule::Options& options) {
  constexpr const char* op = Rule::kOp;
  constexpr bool has_grads = reads_grads(pass_of<Rule>());
  check(!lists.params.empty(), op, ": params has length 0, expected at least 1");
  StepArguments arguments(op, lists.params, has_grads ? &lists.grads : nullptr, lists.offsets,
                          lists.slots);
  const Integers64 noise(op, "noise", lists.noise, 2);
  StepTypes types{};
  types.param_copy = arguments.param_dtype();
  types.param = param_dtype(op, lists.master_params, types.param_copy);
  // Without gradients, the type that a loop of its own has.
  types.grad = has_grads                       ? arguments.grad_dtype()
               : types.param == Dtype::float32 ? Dtype::float32
                                               : Dtype::bfloat16;
  const auto places = take_state<Rule>(arguments, lists, types);
  if (!noise.empty()) {
    check_length(op, "noise", noise.count, arguments.count());
    check(types.state != Dtype::float16, op, ": noise is a tensor, expected None with ",
          types.state, " state");
  }
  const StepCall<Rule> call{
      .options = options,
      .lr = arguments.scalar("lr", scalars.lr_tensor, scalars.lr),
      .grad_scale = arguments.scalar("grad_scale", scalars.grad_scale, 1),
      .found_inf = arguments.scalar("found_inf", scalars.found_inf, 0),
      .maximize = scalars.maximize,
      .types = types,
      .coefficients = scalars.coefficients == nullptr
                          ? nullptr
                          : arguments.factors("coefficients", scalars.coefficients->get()),
  };
  arguments.check_separate();
  const auto tensors =
      list_tensors<Rule::kStates>(arguments, places, noise, types, !lists.master_params.empty());
  if constexpr (measures(pass_of<Rule>())) {
    torch::stable::Tensor squares = arguments.new_doubles(kMeasured);
    Device::measure(call, tensors, static_cast<double*>(squares.data_ptr()),
                    arguments.device_index());
    return squares;
  } else {
    Device::run(call, tensors, arguments.device_index());
  }
}

// Throws if beta is not a decay rate.
inline void check_beta(const char* op, const char* name, double beta) {
  check(beta >= 0 && beta < 1, op, ": ", name, " is ", beta, ", expected 0 <= ", name, " < 1");
}

}  // namespace dsx
