// The torch side of lars_norms and lars_apply_ that both devices share.
#pragma once

#include "optimizers/lars.h"
#include "optimizers/step_call_ops.h"

namespace dsx {

// The ops themselves; lars_ops.cpp and lars_ops_cuda.cpp name the device.
template <class Device>
torch::stable::Tensor lars_norms(const TensorList& params, const TensorList& grads,
                                 const TensorList& master_params, const OptionalTensor& offsets,
                                 const OptionalTensor& slots, const OptionalTensor& grad_scale) {
  const TensorList none;
  return run_step<LarsNorms, Device>({params,
                                      grads,
                                      {{"momentum_buffers", none}},
                                      none,
                                      master_params,
                                      none,
                                      offsets,
                                      slots,
                                      std::nullopt},
                                     {0, std::nullopt, grad_scale, std::nullopt, false}, {});
}

template <class Device>
void lars_apply_(const TensorList& params, const TensorList& grads,
                 const TensorList& momentum_buffers, const TensorList& scales,
                 const TensorList& master_params, const TensorList& steps,
                 const OptionalTensor& offsets, const OptionalTensor& slots,
                 const OptionalTensor& noise, const torch::stable::Tensor& coefficients, double lr,
                 const OptionalTensor& lr_tensor, double momentum, double weight_decay,
                 bool maximize, const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  constexpr const char* op = LarsApply::kOp;
  check_beta(op, "momentum", momentum);
  check(momentum == 0 || !momentum_buffers.empty(), op, ": momentum is ", momentum,
        ", expected 0 without momentum_buffers");
  run_step<LarsApply, Device>({params,
                               grads,
                               {{"momentum_buffers", momentum_buffers}},
                               scales,
                               master_params,
                               steps,
                               offsets,
                               slots,
                               noise},
                              {lr, lr_tensor, grad_scale, found_inf, maximize, &coefficients},
                              {momentum, weight_decay});
}

}  // namespace dsx
