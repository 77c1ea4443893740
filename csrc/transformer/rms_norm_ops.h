// The torch side of rms_norm that both devices share: checks, then tensors into the structs.
// `Device` is what rms_norm_ops.cpp and rms_norm_ops_cuda.cpp have one of each: run(RmsNorm,
// device) and run_backward(RmsNormBackward, grad_weight, device) work things out, or queue that.
#pragma once

#include "common/torch/arguments.h"
#include "common/torch/rows.h"
#include "transformer/rms_norm.h"

namespace dsx {

using torch::stable::Tensor;

inline void check_eps(const char* op, double eps) {
  check(eps >= 0, op, ": eps is ", eps, ", expected a number that is 0 or more");
}

template <class Device>
Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps) {
  constexpr const char* op = "rms_norm";
  const TensorView view(x.get());
  const RowShape shape(op, {"x"}, view);
  RowReader reader(op);
  RmsNorm norm = {};
  norm.rows = shape.rows;
  norm.length = shape.length;
  norm.eps = float(eps);
  norm.x = reader.read({"x"}, view);
  norm.weight = reader.read_vector({"weight"}, weight, shape.length, view);
  check_eps(op, eps);
  NewRows out(view, norm.x.dtype);
  norm.out = out.rows;
  if (view.numel > 0) Device::run(norm, view.device_index);
  return std::move(out.tensor);
}

template <class Device>
std::tuple<Tensor, Tensor> rms_norm_residual(const Tensor& x, const Tensor& residual,
                                             const OptionalTensor& weight, double eps) {
  constexpr const char* op = "rms_norm";
  const TensorView view(x.get());
  const RowShape shape(op, {"x"}, view);
  RowReader reader(op);
  RmsNorm norm = {};
  norm.rows = shape.rows;
  norm.length = shape.length;
  norm.eps = float(eps);
  norm.x = reader.read({"x"}, view);
  norm.residual = reader.read({"residual"}, residual, view);
  norm.weight = reader.read_vector({"weight"}, weight, shape.length, view);
  check_eps(op, eps);
  NewRows out(view, norm.x.dtype), sum(view, norm.residual.dtype);
  norm.out = out.rows;
  norm.sum = sum.rows;
  if (view.numel > 0) Device::run(norm, view.device_index);
  return {std::move(out.tensor), std::move(sum.tensor)};
}

// The gradient of the weight is empty if it is not wanted or there is no weight.
template <class Device>
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_out, const OptionalTensor& grad_sum,
                                             const Tensor& x, const OptionalTensor& weight,
                                             double eps, bool needs_grad_weight) {
  constexpr const char* op = "rms_norm_backward";
  const TensorView view(x.get());
  const RowShape shape(op, {"x"}, view);
  RowReader reader(op);
  RmsNormBackward norm = {};
  norm.rows = shape.rows;
  norm.length = shape.length;
  norm.eps = float(eps);
  norm.grad_out = reader.read({"grad_out"}, grad_out, view);
  norm.grad_sum = reader.read({"grad_sum"}, grad_sum, view);
  norm.x = reader.read({"x"}, view);
  norm.weight = reader.read_vector({"weight"}, weight, shape.length, view);
  check_eps(op, eps);
  const bool has_grad_weight = needs_grad_weight && weight.has_value();
  const int64_t weight_length = has_grad_weight ? shape.length : 0;
  NewRows grad_x(view, norm.x.dtype);
  norm.grad_x = grad_x.rows;
  Tensor grad_weight = new_tensor(&weight_length, 1, torch_code(norm.weight.dtype), view);
  const Rows weight_row{has_grad_weight ? grad_weight.data_ptr() : nullptr, 0, norm.weight.dtype};
  Device::run_backward(norm, weight_row, view.device_index);
  return {std::move(grad_x.tensor), std::move(grad_weight)};
}

}  // namespace dsx
