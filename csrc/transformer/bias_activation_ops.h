// The torch side of bias_activation that both devices share: checks, then tensors into the structs.
// `Device` is what bias_activation_ops.cpp and bias_activation_ops_cuda.cpp have one of each:
// run(BiasActivation, device) and run_backward(BiasActivationBackward, grad_bias, device) work
// things out, or queue that.
#pragma once

#include "common/torch/arguments.h"
#include "transformer/activation_ops.h"
#include "transformer/bias_activation.h"

namespace dsx {

using torch::stable::Tensor;

template <class Device>
Tensor bias_activation(const Tensor& x, const OptionalTensor& bias, int64_t activation) {
  constexpr const char* op = "bias_activation";
  const TensorView view(x.get());
  auto call = call_over<BiasActivation>(op, {"x"}, view, activation);
  RowReader reader(op);
  call.x = reader.read({"x"}, view);
  call.bias = reader.read_vector({"bias"}, bias, call.length, view);
  NewRows out(view, call.x.dtype);
  call.out = out.rows;
  if (call.bias.data == nullptr) join_rows(call, {&call.x, &call.out});
  if (view.numel > 0) Device::run(call, view.device_index);
  return std::move(out.tensor);
}

// The gradient of the bias is empty if it is not wanted or there is no bias.
template <class Device>
std::tuple<Tensor, Tensor> bias_activation_backward(const Tensor& grad_out, const Tensor& x,
                                                    const OptionalTensor& bias, int64_t activation,
                                                    bool needs_grad_bias) {
  constexpr const char* op = "bias_activation_backward";
  const TensorView view(x.get());
  auto call = call_over<BiasActivationBackward>(op, {"x"}, view, activation);
  RowReader reader(op);
  call.grad_out = reader.read({"grad_out"}, grad_out, view);
  call.x = reader.read({"x"}, view);
  call.bias = reader.read_vector({"bias"}, bias, call.length, view);
  const bool has_grad_bias = needs_grad_bias && bias.has_value();
  const int64_t bias_length = has_grad_bias ? call.length : 0;
  NewRows grad_x(view, call.x.dtype);
  call.grad_x = grad_x.rows;
  Tensor grad_bias = new_tensor(&bias_length, 1, torch_code(call.bias.dtype), view);
  const Rows bias_row{has_grad_bias ? grad_bias.data_ptr() : nullptr, 0, call.bias.dtype};
  if (!bias.has_value()) join_rows(call, {&call.grad_out, &call.x, &call.grad_x});
  Device::run_backward(call, bias_row, view.device_index);
  return {std::move(grad_x.tensor), std::move(grad_bias)};
}

}  // namespace dsx
