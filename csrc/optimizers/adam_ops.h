// The torch side of adam_step_ that both devices share: every check, then tensors into AdamTensor.
#pragma once

#include "optimizers/adam.h"
#include "optimizers/step_ops.h"

namespace dsx {

// Throws if beta is not a decay rate.
inline void check_beta(const char* op, const char* name, double beta) {
  check(beta >= 0 && beta < 1, op, ": ", name, " is ", beta, ", expected 0 <= ", name, " < 1");
}

// The op itself. Device::run(call, tensors, device_index) queues or makes the step; adam_ops.cpp
// and adam_ops_cuda.cpp have one each.
template <class Device>
void adam_step_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                const TensorList& exp_avg_sqs, const TensorList& max_exp_avg_sqs,
                const TensorList& master_params, const TensorList& steps,
                const std::optional<torch::stable::Tensor>& offsets,
                const std::optional<torch::stable::Tensor>& slots, double lr,
                const std::optional<torch::stable::Tensor>& lr_tensor, double beta1, double beta2,
                double eps, double weight_decay, bool decoupled, bool maximize,
                bool bias_correction, const std::optional<torch::stable::Tensor>& grad_scale,
                const std::optional<torch::stable::Tensor>& found_inf) {
  constexpr const char* op = "adam_step_";
  if (params.empty()) return check_length(op, "grads", grads.size(), 0);
  check_beta(op, "beta1", beta1);
  check_beta(op, "beta2", beta2);

  StepArguments arguments(op, params, grads, offsets, slots);
  const bool has_masters = !master_params.empty();
  const Dtype param_dtype = arguments.param_dtype();
  check(!has_masters || param_dtype != Dtype::float32, op, ": ", Item{"params", 0}, " is ",
        param_dtype, ", expected bfloat16 or float16 with master_params");
  Dtype moment_dtype = Dtype::float32;  // or that of the parameters
  if (!exp_avgs.empty() && param_dtype != Dtype::float32) {
    const Item item{"exp_avgs", 0};
    moment_dtype = storage_dtype(op, item, TensorView(exp_avgs[0]));
    check(moment_dtype == Dtype::float32 || moment_dtype == param_dtype, op, ": ", item, " is ",
          moment_dtype, ", expected float32 or ", param_dtype);
  }
  const State exp_avg = arguments.state("exp_avgs", exp_avgs, moment_dtype);
  const State exp_avg_sq = arguments.state("exp_avg_sqs", exp_avg_sqs, moment_dtype);
  State max_exp_avg_sq, master;
  if (!max_exp_avg_sqs.empty()) {
    max_exp_avg_sq = arguments.state("max_exp_avg_sqs", max_exp_avg_sqs, moment_dtype);
  }
  if (has_masters) master = arguments.state("master_params", master_params, Dtype::float32);
  const State step = arguments.steps("steps", steps);
  const AdamOptions options{
      .lr = arguments.scalar("lr", lr_tensor, lr),
      .beta1 = beta1,
      .beta2 = beta2,
      .eps = eps,
      .weight_decay = weight_decay,
      .decoupled = decoupled,
      .maximize = maximize,
      .bias_correction = bias_correction,
      .grad_scale = arguments.scalar("grad_scale", grad_scale, 1),
      .found_inf = arguments.scalar("found_inf", found_inf, 0),
  };
  arguments.check_separate();

  std::vector<AdamTensor> tensors(arguments.count());
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i] = {
        .param = has_masters ? master[i] : arguments.param(i),
        .grad = arguments.grad(i),
        .exp_avg = exp_avg[i],
        .exp_avg_sq = exp_avg_sq[i],
        .max_exp_avg_sq = max_exp_avg_sq[i],
        .param_copy = has_masters ? arguments.param(i) : nullptr,
        .step = static_cast<float*>(step[i]),
        .n = arguments.numel(i),
    };
  }
  const AdamCall call{options, has_masters ? Dtype::float32 : param_dtype, arguments.grad_dtype(),
                      moment_dtype, param_dtype};
  Device::run(call, tensors, arguments.device_index());
}

}  // namespace dsx
