// The torch side of sgd_step_ that both devices share.
#pragma once

#include "optimizers/sgd.h"
#include "optimizers/step_call_ops.h"

namespace dsx {

// The op itself; sgd_ops.cpp and sgd_ops_cuda.cpp name the device.
template <class Device>
void sgd_step_(const TensorList& params, const TensorList& grads,
               const TensorList& momentum_buffers, const TensorList& scales,
               const TensorList& master_params, const TensorList& steps,
               const OptionalTensor& offsets, const OptionalTensor& slots,
               const OptionalTensor& noise, double lr, const OptionalTensor& lr_tensor,
               double momentum, double dampening, double weight_decay, bool nesterov,
               bool wd_after_momentum, bool maximize, const OptionalTensor& grad_scale,
               const OptionalTensor& found_inf) {
  if (params.empty()) return check_length(Sgd::kOp, "grads", grads.size(), 0);
  check(momentum >= 0, Sgd::kOp, ": momentum is ", momentum, ", expected at least 0");
  if (momentum == 0) {
    check_length(Sgd::kOp, "momentum_buffers", momentum_buffers.size(), 0);
  } else {
    check(!momentum_buffers.empty(), Sgd::kOp, ": momentum_buffers has length 0, expected ",
          offsets.has_value() ? 1 : params.size());
  }
  run_step<Sgd, Device>({params,
                         grads,
                         {{"momentum_buffers", momentum_buffers}},
                         scales,
                         master_params,
                         steps,
                         offsets,
                         slots,
                         noise},
                        {lr, lr_tensor, grad_scale, found_inf, maximize},
                        {.momentum = momentum,
                         .dampening = dampening,
                         .weight_decay = weight_decay,
                         .nesterov = nesterov,
                         .wd_after_momentum = wd_after_momentum});
}

}  // namespace dsx
