// The torch side of bias_dropout_residual and dropout_activation, for the device that this is
// compiled for. The schemas are in deepspeed_ext/ops/elementwise, in files of these names.
#include "common/torch/activation.h"
#include "common/torch/slots.h"
#include "elementwise/dropout.h"
#include "elementwise/elementwise_ops.h"

namespace dsx {
namespace {

// The seed stays where the tensors are: a CUDA graph reads what each replay has drawn.
Dropout dropout_of(const char* op, double p, const OptionalTensor& seed, const TensorView& beside) {
  check(p >= 0 && p <= 1, op, ": p is ", p, ", expected a number from 0 to 1");
  if (!seed.has_value()) {
    check(p == 0, op, ": seed is None, expected a tensor, as p is ", p);
    return make_dropout(0, nullptr);
  }
  const WholeNumbers numbers(op, {"seed"}, *seed, aoti_torch_dtype_int64(), beside);
  check(numbers.view.numel == 1, op, ": seed has shape ",
        Integers{numbers.view.sizes, numbers.view.dim}, ", expected one element");
  return make_dropout(p, numbers.numbers<int64_t>());
}

Tensor bias_dropout_residual(const Tensor& x, const OptionalTensor& bias,
                             const OptionalTensor& residual, const OptionalTensor& seed, double p) {
  ElementwiseCall<BiasDropoutResidual> call({"x"}, x);
  call.read(0, {"x"}, x);
  call.read_bias(0, {"bias"}, bias);
  call.read(2, {"residual"}, residual);
  call.rule().dropout = dropout_of(BiasDropoutResidual::kOp, p, seed, call.like());
  Tensor out = call.make(0, call.dtype(residual.has_value() ? 2 : 0));
  call.run();
  return out;
}

// The gradient of the bias is empty if it is not wanted or there is no bias.
std::tuple<Tensor, Tensor> bias_dropout_residual_backward(const Tensor& grad_out,
                                                          const OptionalTensor& bias,
                                                          const OptionalTensor& seed, double p,
                                                          bool needs_grad_bias) {
  using Rule = BiasDropoutResidualBackward;
  ElementwiseCall<Rule> call({"grad_out"}, grad_out);
  call.read(0, {"grad_out"}, grad_out);
  Dtype dtype = Dtype::float32;
  if (bias.has_value()) dtype = storage_dtype(Rule::kOp, {"bias"}, TensorView(bias->get()));
  call.rule().dropout = dropout_of(Rule::kOp, p, seed, call.like());
  Tensor grad_x = call.make(0, call.dtype(0));
  Tensor grad_bias = call.make_sum(0, needs_grad_bias && bias.has_value(), dtype);
  call.run();
  return {std::move(grad_x), std::move(grad_bias)};
}

Tensor dropout_activation(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& seed,
                          double p, int64_t activation) {
  ElementwiseCall<DropoutActivation> call({"x"}, x);
  call.rule().activation = activation_of(DropoutActivation::kOp, activation);
  call.read(0, {"x"}, x);
  call.read_bias(0, {"bias"}, bias);
  call.rule().dropout = dropout_of(DropoutActivation::kOp, p, seed, call.like());
  Tensor out = call.make(0, call.dtype(0));
  call.run();
  return out;
}

// As above.
std::tuple<Tensor, Tensor> dropout_activation_backward(const Tensor& grad_out, const Tensor& x,
                                                       const OptionalTensor& bias,
                                                       const OptionalTensor& seed, double p,
                                                       int64_t activation, bool needs_grad_bias) {
  ElementwiseCall<DropoutActivationBackward> call({"x"}, x);
  call.rule().activation = activation_of(DropoutActivationBackward::kOp, activation);
  call.read(0, {"grad_out"}, grad_out);
  call.read(1, {"x"}, x);
  call.read_bias(1, {"bias"}, bias);
  call.rule().dropout = dropout_of(DropoutActivationBackward::kOp, p, seed, call.like());
  Tensor grad_x = call.make(0, call.dtype(1));
  Tensor grad_bias = call.make_sum(0, needs_grad_bias && bias.has_value(), call.dtype_of_bias(1));
  call.run();
  return {std::move(grad_x), std::move(grad_bias)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("bias_dropout_residual", &boxed<&bias_dropout_residual>);
  library.impl("bias_dropout_residual_backward", &boxed<&bias_dropout_residual_backward>);
  library.impl("dropout_activation", &boxed<&dropout_activation>);
  library.impl("dropout_activation_backward", &boxed<&dropout_activation_backward>);
}

}  // namespace dsx
