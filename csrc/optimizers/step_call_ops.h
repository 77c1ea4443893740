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

// Checks everything, then hands the call and its tensors to Device::run.
template <class Rule, class Device>
void run_step(const StepLists<Rule::kStates>& lists, const StepScalars& scalars,
              const typename Rule::Options& options) {
  constexpr const char* op = Rule::kOp;
  constexpr int kStates = Rule::kStates;
  StepArguments arguments(op, lists.params, lists.grads, lists.offsets, lists.slots);
  const Integers64 noise(op, "noise", lists.noise, 2);
  StepTypes types{};
  types.grad = arguments.grad_dtype();
  types.param_copy = arguments.param_dtype();
  types.param = param_dtype(op, lists.master_params, types.param_copy);

  State states[kStates], scales[kStates], masters;
  while (types.states < kStates &&
         (types.states < Rule::kRequiredStates || !lists.states[types.states].tensors.empty())) {
    ++types.states;
  }
  for (int j = 0; j < types.states; ++j) {
    const auto& [name, tensors] = lists.states[j];
    if (j == 0 && !tensors.empty()) {
      types.state = state_dtype(op, {name, 0}, TensorView(tensors[0]), types.param_copy);
    }
    states[j] = arguments.state(name, tensors, types.state);
  }
  const bool coded = types.states > 0 && types.state == Dtype::codes;
  if (!coded) check_length(op, "scales", lists.scales.size(), 0);
  for (int j = 0; coded && j < types.states; ++j) {
    scales[j] = arguments.scales(lists.scales, size_t(j), size_t(types.states));
  }
  if (!noise.empty()) {
    check_length(op, "noise", noise.count, arguments.count());
    check(types.state != Dtype::float16, op, ": noise is a tensor, expected None with ",
          types.state, " state");
  }
  const Dtype master = types.param == Dtype::split ? Dtype::split : Dtype::float32;
  const bool has_masters = !lists.master_params.empty();
  if (has_masters) masters = arguments.state("master_params", lists.master_params, master);
  const State steps = arguments.steps("steps", lists.steps);
  const StepCall<Rule> call{options,
                            arguments.scalar("lr", scalars.lr_tensor, scalars.lr),
                            arguments.scalar("grad_scale", scalars.grad_scale, 1),
                            arguments.scalar("found_inf", scalars.found_inf, 0),
                            scalars.maximize,
                            types};
  arguments.check_separate();

  std::vector<StepTensor<kStates>> tensors(arguments.count());
  for (size_t i = 0; i < tensors.size(); ++i) {
    StepTensor<kStates>& tensor = tensors[i];
    tensor.param = types.param == Dtype::float32 && has_masters ? masters[i] : arguments.param(i);
    tensor.param_copy = types.param == Dtype::split ? masters[i]
                        : has_masters               ? arguments.param(i)
                                                    : nullptr;
    tensor.grad = arguments.grad(i);
    for (int j = 0; j < types.states; ++j) {
      tensor.states[j] = states[j][i];
      tensor.scales[j] = static_cast<float*>(scales[j][i]);
    }
    tensor.step = static_cast<float*>(steps[i]);
    if (!noise.empty()) tensor.noise = {uint64_t(noise[2 * i]), noise[2 * i + 1], true};
    tensor.n = arguments.numel(i);
  }
  Device::run(call, tensors, arguments.device_index());
}

// Throws if beta is not a decay rate.
inline void check_beta(const char* op, const char* name, double beta) {
  check(beta >= 0 && beta < 1, op, ": ", name, " is ", beta, ", expected 0 <= ", name, " < 1");
}

}  // namespace dsx
