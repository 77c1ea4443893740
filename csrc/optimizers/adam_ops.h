// The torch side of adam_step_ that both devices share.
#pragma once

#include "optimizers/adam.h"
#include "optimizers/step_call_ops.h"

namespace dsx {

// The op itself; adam_ops.cpp and adam_ops_cuda.cpp name the device.
template <class Device>
void adam_step_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                const TensorList& exp_avg_sqs, const TensorList& max_exp_avg_sqs,
                const TensorList& scales, const TensorList& master_params, const TensorList& steps,
                const OptionalTensor& offsets, const OptionalTensor& slots,
                const OptionalTensor& noise, double lr, const OptionalTensor& lr_tensor,
                double beta1, double beta2, double eps, double weight_decay, bool decoupled,
                bool bias_correction, bool maximize, const OptionalTensor& grad_scale,
                const OptionalTensor& found_inf) {
  if (params.empty()) return check_length(Adam::kOp, "grads", grads.size(), 0);
  check_beta(Adam::kOp, "beta1", beta1);
  check_beta(Adam::kOp, "beta2", beta2);
  const Adam::Options options{
      .beta1 = beta1,
      .beta2 = beta2,
      .eps = eps,
      .weight_decay = weight_decay,
      .decoupled = decoupled,
      .bias_correction = bias_correction,
      .amsgrad = !max_exp_avg_sqs.empty(),
  };
  run_step<Adam, Device>(
      {params,
       grads,
       {{"exp_avgs", exp_avgs}, {"exp_avg_sqs", exp_avg_sqs}, {"max_exp_avg_sqs", max_exp_avg_sqs}},
       scales,
       master_params,
       steps,
       offsets,
       slots,
       noise},
      {lr, lr_tensor, grad_scale, found_inf, maximize}, options);
}

}  // namespace dsx
