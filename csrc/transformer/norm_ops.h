// The torch side of a norm that both devices share: checks, then tensors into the structs.
// `Device` is what norm_ops.cpp and norm_ops_cuda.cpp have one of each: run(Norm, device) and
// run_backward(NormBackward, grads, device) work things out, or queue that.
#pragma once

#include <cmath>
#include <string>

#include "common/torch/arguments.h"
#include "common/torch/rows.h"
#include "transformer/norm.h"

namespace dsx {

using torch::stable::Tensor;

// The arguments that forward and backward have in common.
template <class Call>
struct NormReader {
  TensorView view;  // of x
  RowShape shape;
  RowReader reader;
  const char* op;
  Call call = {};

  NormReader(const char* name, const Tensor& x, const OptionalTensor& weight, double eps,
             double weight_offset)
      : view(x.get()), shape(name, {"x"}, view), reader(name), op(name) {
    call.rows = shape.rows;
    call.length = shape.length;
    call.x = reader.read({"x"}, view);
    call.weight = vector({"weight"}, weight);
    check(eps >= 0, op, ": eps is ", eps, ", expected a number that is 0 or more");
    check(std::isfinite(weight_offset), op, ": weight_offset is ", weight_offset,
          ", expected a finite number");
    call.eps = float(eps);
    call.weight_offset = float(weight_offset);
  }

  Rows like_x(const Item& item, const OptionalTensor& tensor) {
    return reader.read(item, tensor, view);
  }
  Rows vector(const Item& item, const OptionalTensor& tensor) {
    return reader.read_vector(item, tensor, shape.length, view);
  }
  // Empty if it is not wanted.
  Tensor new_vector(bool wanted, Dtype dtype) const {
    const int64_t length = wanted ? shape.length : 0;
    return new_tensor(&length, 1, torch_code(dtype), view);
  }
};

template <class Kind, class Device>
Tensor norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
            double weight_offset) {
  NormReader<Norm> reader(Kind::kOp, x, weight, eps, weight_offset);
  reader.call.bias = reader.vector({"bias"}, bias);
  NewRows out(reader.view, reader.call.x.dtype);
  reader.call.out = out.rows;
  if (reader.view.numel > 0) Device::run(reader.call, reader.view.device_index);
  return std::move(out.tensor);
}

// The sum is empty if it is not wanted.
template <class Kind, class Device>
std::tuple<Tensor, Tensor> norm_residual(const Tensor& x, const Tensor& residual,
                                         const OptionalTensor& x_bias, const OptionalTensor& weight,
                                         const OptionalTensor& bias, double eps,
                                         double weight_offset, bool needs_sum) {
  NormReader<Norm> reader(Kind::kOp, x, weight, eps, weight_offset);
  Norm& call = reader.call;
  call.residual = reader.like_x({"residual"}, residual);
  call.x_bias = reader.vector({"x_bias"}, x_bias);
  call.bias = reader.vector({"bias"}, bias);
  NewRows out(reader.view, call.x.dtype);
  call.out = out.rows;
  const auto run = [&] {
    if (reader.view.numel > 0) Device::run(call, reader.view.device_index);
  };
  if (!needs_sum && call.residual.dtype == call.x.dtype) {
    run();
    return {std::move(out.tensor), reader.new_vector(false, call.residual.dtype)};
  }
  NewRows sum(reader.view, call.residual.dtype);  // where dtypes differ, there is no other place
  call.sum = sum.rows;
  run();
  Tensor kept = needs_sum ? std::move(sum.tensor) : reader.new_vector(false, call.residual.dtype);
  return {std::move(out.tensor), std::move(kept)};
}

// Of the vectors, those are wanted that are given and, of the weight, whose gradient is needed; the
// gradients of others are empty.
template <class Kind, class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward(
    const Tensor& grad_out, const OptionalTensor& grad_sum, const Tensor& x,
    const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& x_bias,
    double eps, double weight_offset, bool needs_grad_weight) {
  NormReader<NormBackward> reader(Kind::kBackwardOp, x, weight, eps, weight_offset);
  NormBackward& call = reader.call;
  call.grad_out = reader.like_x({"grad_out"}, grad_out);
  call.grad_sum = reader.like_x({"grad_sum"}, grad_sum);
  NewRows grad_x(reader.view, call.x.dtype);
  call.grad_x = grad_x.rows;
  OfVectors<Rows> grads;
  const auto new_grad = [&](bool wanted, const Rows& vector, Rows& grad) {
    Tensor tensor = reader.new_vector(wanted, vector.dtype);
    if (wanted) grad = {tensor.data_ptr(), 0, vector.dtype};
    return tensor;
  };
  Tensor grad_weight = new_grad(needs_grad_weight && weight.has_value(), call.weight, grads.weight);
  Tensor grad_bias = new_grad(bias.has_value(), reader.vector({"bias"}, bias), grads.bias);
  Tensor grad_x_bias =
      new_grad(x_bias.has_value(), reader.vector({"x_bias"}, x_bias), grads.x_bias);
  Device::run_backward(call, grads, reader.view.device_index);
  return {std::move(grad_x.tensor), std::move(grad_weight), std::move(grad_bias),
          std::move(grad_x_bias)};
}

template <class Kind, class Device, class Library>
void register_norm(Library& library) {
  const std::string op = Kind::kOp;
  library.impl(Kind::kOp, &boxed<&norm<Kind, Device>>);
  library.impl((op + ".residual").c_str(), &boxed<&norm_residual<Kind, Device>>);
  library.impl(Kind::kBackwardOp, &boxed<&norm_backward<Kind, Device>>);
}

}  // namespace dsx
