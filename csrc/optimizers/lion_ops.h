// The torch side of lion_step_ that both devices share.
#pragma once

#include "optimizers/lion.h"
#include "optimizers/step_call_ops.h"

namespace dsx {

// The op itself; lion_ops.cpp and lion_ops_cuda.cpp name the device.
template <class Device>
void lion_step_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                const TensorList& scales, const TensorList& master_params, const TensorList& steps,
                const OptionalTensor& offsets, const OptionalTensor& slots,
                const OptionalTensor& noise, double lr, const OptionalTensor& lr_tensor,
                double beta1, double beta2, double weight_decay, bool maximize,
                const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  if (params.empty()) return check_length(Lion::kOp, "grads", grads.size(), 0);
  check_beta(Lion::kOp, "beta1", beta1);
  check_beta(Lion::kOp, "beta2", beta2);
  run_step<Lion, Device>({params,
                          grads,
                          {{"exp_avgs", exp_avgs}},
                          scales,
                          master_params,
                          steps,
                          offsets,
                          slots,
                          noise},
                         {lr, lr_tensor, grad_scale, found_inf, maximize},
                         {.beta1 = beta1, .beta2 = beta2, .weight_decay = weight_decay});
}

}  // namespace dsx
