// From the arguments of a step op to the call of its kernel, the same way for every optimizer.
#pragma once

#include "optimizers/step.h"
#include "optimizers/step_arguments_ops.h"

namespace dsx {

// What an op updates, of those that it knows: lists of tensors, or slabs of state.
template <int kStates>
struct UpdatedLists {
  TensorList params, states[kStates], scales, master_params, steps;
};

// The arguments of a step op but for its options. What a rule has no use for is empty.
template <int kStates>
struct StepLists {
  UpdatedLists<kStates> source;
  UpdatedLists<kStates> target;  // empty if the step is in place
  bool in_place = true;
  TensorList grads;
  OptionalTensor offsets, slots, noise;
  OptionalTensor coefficients;  // factor of lr for each parameter

  // One of both lists as an argument, if `written` one with a target.
  Updated updated(const char* name, const TensorList& read, const TensorList& other,
                  bool written) const {
    return {name, read, in_place || !written ? nullptr : &other};
  }
};

struct StepScalars {
  double lr = 0;
  OptionalTensor lr_tensor, grad_scale, found_inf;
  bool maximize = false;
};

// How state is stored. Throws if parameters of this dtype cannot have it.
inline Format state_format(const char* op, const Item& item, const TensorView& view, Dtype param) {
  for (Format format : {Format::float32, Format::bfloat16, Format::codes, format_of(param)}) {
    if (view.dtype == torch_code(format)) return format;
  }
  check(false, op, ": ", item, " is ", DtypeCode{view.dtype}, ", expected float32, bfloat16",
        param == Dtype::float16 ? ", float16" : "", " or uint8");
  return {};
}

// How weights are stored: parameters, with their master weights if there are any.
inline Format weight_format(const char* op, const TensorList& master_params, Dtype param) {
  if (master_params.empty()) return format_of(param);
  const Item item{"params", 0};
  if (TensorView(master_params[0]).dtype == torch_code(Format::split)) {
    check(param == Dtype::bfloat16, op, ": ", item, " is ", param,
          ", expected bfloat16 with master_params of int16");
    return Format::split;
  }
  check(param != Dtype::float32, op, ": ", item, " is ", param,
        ", expected bfloat16 or float16 with master_params");
  return Format::float32;
}

// Where everything lies that has a part for each parameter.
template <int kStates>
struct StepAddresses {
  UpdatedAddresses states[kStates], scales[kStates], master_weights, step_counts;
};

// Checks what a step reads and writes beside parameters and gradients; completes the types.
template <class Rule>
StepAddresses<Rule::kStates> take_state(StepArguments& arguments,
                                        const StepLists<Rule::kStates>& lists, StepTypes& types) {
  constexpr Pass pass = pass_of<Rule>();
  const UpdatedLists<Rule::kStates>&source = lists.source, &target = lists.target;
  StepAddresses<Rule::kStates> addresses;
  size_t states = 0;
  for (int j = 0; j < Rule::kStates; ++j) {
    const Updated state = lists.updated(Rule::kStateNames[j], source.states[j], target.states[j],
                                        writes_states(pass));
    if (j >= Rule::kRequiredStates && state.source.empty()) {
      arguments.check_none(state);
      continue;
    }
    if (states == 0 && !state.source.empty()) {
      types.state =
          state_format(Rule::kOp, {state.name, 0}, TensorView(state.source[0]), types.param);
    }
    addresses.states[j] = arguments.state(state, types.state);
    types.states |= 1 << j;
    ++states;
  }
  const Updated scales = lists.updated("scales", source.scales, target.scales, writes_states(pass));
  const bool coded = states > 0 && types.state == Format::codes;
  if (!coded) arguments.check_none(scales);
  for (size_t j = 0, index = 0; coded && j < Rule::kStates; ++j) {
    if (types.has_state(int(j))) {
      addresses.scales[j] = arguments.scales(scales, index++, states);
    }
  }
  const Updated master_weights = lists.updated("master_params", source.master_params,
                                               target.master_params, writes_weights(pass));
  if (master_weights.source.empty()) {
    arguments.check_none(master_weights);
  } else {
    const Format master = types.weight == Format::split ? Format::split : Format::float32;
    addresses.master_weights = arguments.state(master_weights, master);
  }
  if (reads_step_counts(pass)) {
    addresses.step_counts = arguments.step_counts(
        lists.updated("steps", source.steps, target.steps, advances_step_counts(pass)));
  }
  return addresses;
}

// The tensors of a call as its kernel takes them.
template <class Rule>
std::vector<StepTensor<Rule::kStates>> list_tensors(const StepArguments& arguments,
                                                    const StepAddresses<Rule::kStates>& addresses,
                                                    const Integers64& noise) {
  std::vector<StepTensor<Rule::kStates>> tensors(arguments.count());
  for (size_t i = 0; i < tensors.size(); ++i) {
    StepTensor<Rule::kStates>& tensor = tensors[i];
    auto& [source, target, grad, key, n] = tensor;
    source.param = arguments.param(i);
    target.param = arguments.param_target(i);
    source.master = addresses.master_weights.source[i];
    target.master = addresses.master_weights.target[i];
    for (int j = 0; j < Rule::kStates; ++j) {
      source.states[j] = addresses.states[j].source[i];
      target.states[j] = addresses.states[j].target[i];
      source.scales[j] = static_cast<float*>(addresses.scales[j].source[i]);
      target.scales[j] = static_cast<float*>(addresses.scales[j].target[i]);
    }
    source.step_count = static_cast<float*>(addresses.step_counts.source[i]);
    target.step_count = static_cast<float*>(addresses.step_counts.target[i]);
    grad = arguments.grad(i);
    if (!noise.empty()) key = {uint64_t(noise[2 * i]), noise[2 * i + 1], true};
    n = arguments.numel(i);
  }
  return tensors;
}

// Checks everything, then hands the call and its tensors to Device::run, or, of a rule that
// measures, to Device::measure, and returns the squares.
template <class Rule, class Device>
auto run_step(const StepLists<Rule::kStates>& lists, const StepScalars& scalars,
              const typename Rule::Options& options) {
  constexpr const char* op = Rule::kOp;
  constexpr Pass pass = pass_of<Rule>();
  constexpr bool has_grads = reads_grads(pass);
  const Updated params =
      lists.updated("params", lists.source.params, lists.target.params, writes_weights(pass));
  check(!params.source.empty(), op, ": params has length 0, expected at least 1");
  StepArguments arguments(op, params, has_grads ? &lists.grads : nullptr, lists.offsets,
                          lists.slots);
  const Integers64 noise(op, "noise", lists.noise, 2);
  StepTypes types{};
  types.param = arguments.param_dtype();
  types.weight = weight_format(op, lists.source.master_params, types.param);
  // Without gradients, the type that a loop of its own has.
  types.grad = has_grads                         ? arguments.grad_dtype()
               : types.weight == Format::float32 ? Dtype::float32
                                                 : Dtype::bfloat16;
  const auto addresses = take_state<Rule>(arguments, lists, types);
  if (!noise.empty()) {
    check_length(op, {"noise"}, noise.count, arguments.count());
    check(types.state != Format::float16, op, ": noise is a tensor, expected None with ",
          types.state, " state");
  }
  StepCall<Rule> call{
      .options = options,
      .lr = arguments.scalar("lr", scalars.lr_tensor, scalars.lr),
      .grad_scale = arguments.scalar("grad_scale", scalars.grad_scale, 1),
      .found_inf = arguments.scalar("found_inf", scalars.found_inf, 0),
      .maximize = scalars.maximize,
      .types = types,
      .in_place = lists.in_place,
  };
  if (has_coefficients<Rule>()) {
    call.coefficients = arguments.factors("coefficients", lists.coefficients->get());
  }
  arguments.check_separate();
  const auto tensors = list_tensors<Rule>(arguments, addresses, noise);
  if constexpr (measures(pass)) {
    const int64_t sizes[] = {int64_t(tensors.size()), kMeasured};
    torch::stable::Tensor squares =
        new_tensor(sizes, 2, aoti_torch_dtype_float64(), arguments.device());
    Device::measure(call, tensors, static_cast<double*>(squares.data_ptr()),
                    arguments.device().device_index);
    return squares;
  } else {
    Device::run(call, tensors, arguments.device().device_index);
  }
}

}  // namespace dsx
