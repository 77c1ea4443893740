// The torch side of lamb_moments_ and lamb_apply_ that both devices share.
#pragma once

#include "optimizers/lamb.h"
#include "optimizers/step_call_ops.h"

namespace dsx {

// The ops themselves; lamb_ops.cpp and lamb_ops_cuda.cpp name the device.
template <class Device>
torch::stable::Tensor lamb_moments_(const TensorList& params, const TensorList& grads,
                                    const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                                    const TensorList& scales, const TensorList& master_params,
                                    const TensorList& steps, const OptionalTensor& offsets,
                                    const OptionalTensor& slots, const OptionalTensor& noise,
                                    double beta1, double beta2, double eps, double weight_decay,
                                    bool eps_inside_sqrt, bool bias_correction, bool maximize,
                                    const OptionalTensor& grad_scale,
                                    const OptionalTensor& found_inf) {
  check_beta(LambMoments::kOp, "beta1", beta1);
  check_beta(LambMoments::kOp, "beta2", beta2);
  return run_step<LambMoments, Device>(
      {params,
       grads,
       {{"exp_avgs", exp_avgs}, {"exp_avg_sqs", exp_avg_sqs}},
       scales,
       master_params,
       steps,
       offsets,
       slots,
       noise},
      {0, std::nullopt, grad_scale, found_inf, maximize},
      {beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction});
}

template <class Device>
void lamb_apply_(const TensorList& params, const TensorList& exp_avgs,
                 const TensorList& exp_avg_sqs, const TensorList& scales,
                 const TensorList& master_params, const TensorList& steps,
                 const OptionalTensor& offsets, const OptionalTensor& slots,
                 const torch::stable::Tensor& coefficients, double lr,
                 const OptionalTensor& lr_tensor, double beta1, double beta2, double eps,
                 double weight_decay, bool eps_inside_sqrt, bool bias_correction,
                 const OptionalTensor& found_inf) {
  check_beta(LambApply::kOp, "beta1", beta1);
  check_beta(LambApply::kOp, "beta2", beta2);
  run_step<LambApply, Device>({params,
                               {},
                               {{"exp_avgs", exp_avgs}, {"exp_avg_sqs", exp_avg_sqs}},
                               scales,
                               master_params,
                               steps,
                               offsets,
                               slots,
                               std::nullopt},
                              {lr, lr_tensor, std::nullopt, found_inf, false, &coefficients},
                              {beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction});
}

}  // namespace dsx
