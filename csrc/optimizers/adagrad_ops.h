// The torch side of adagrad_step_ that both devices share.
#pragma once

#include "optimizers/adagrad.h"
#include "optimizers/step_call_ops.h"

namespace dsx {

// The op itself; adagrad_ops.cpp and adagrad_ops_cuda.cpp name the device.
template <class Device>
void adagrad_step_(const TensorList& params, const TensorList& grads, const TensorList& sums,
                   const TensorList& scales, const TensorList& master_params,
                   const TensorList& steps, const OptionalTensor& offsets,
                   const OptionalTensor& slots, const OptionalTensor& noise, double lr,
                   const OptionalTensor& lr_tensor, double lr_decay, double eps,
                   double weight_decay, bool maximize, const OptionalTensor& grad_scale,
                   const OptionalTensor& found_inf) {
  if (params.empty()) return check_length(Adagrad::kOp, "grads", grads.size(), 0);
  run_step<Adagrad, Device>(
      {params, grads, {{"sums", sums}}, scales, master_params, steps, offsets, slots, noise},
      {lr, lr_tensor, grad_scale, found_inf, maximize},
      {.lr_decay = lr_decay, .eps = eps, .weight_decay = weight_decay});
}

}  // namespace dsx
