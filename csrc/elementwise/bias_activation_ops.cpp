// The torch side of bias_activation, for the device that this is compiled for. The schemas are in
// deepspeed_ext/ops/elementwise/bias_activation.py.
#include "common/torch/activation.h"
#include "elementwise/bias_activation.h"
#include "elementwise/elementwise_ops.h"

namespace dsx {
namespace {

Tensor bias_activation(const Tensor& x, const OptionalTensor& bias, int64_t activation) {
  ElementwiseCall<BiasActivation> call({"x"}, x);
  call.rule().activation = activation_of(BiasActivation::kOp, activation);
  call.read(0, {"x"}, x);
  call.read_bias(0, {"bias"}, bias);
  Tensor out = call.make(0, call.dtype(0));
  call.run();
  return out;
}

// The gradient of the bias is empty if it is not wanted or there is no bias.
std::tuple<Tensor, Tensor> bias_activation_backward(const Tensor& grad_out, const Tensor& x,
                                                    const OptionalTensor& bias, int64_t activation,
                                                    bool needs_grad_bias) {
  ElementwiseCall<BiasActivationBackward> call({"x"}, x);
  call.rule().activation = activation_of(BiasActivationBackward::kOp, activation);
  call.read(0, {"grad_out"}, grad_out);
  call.read(1, {"x"}, x);
  call.read_bias(1, {"bias"}, bias);
  Tensor grad_x = call.make(0, call.dtype(1));
  Tensor grad_bias = call.make_sum(0, needs_grad_bias && bias.has_value(), call.dtype_of_bias(1));
  call.run();
  return {std::move(grad_x), std::move(grad_bias)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("bias_activation", &boxed<&bias_activation>);
  library.impl("bias_activation_backward", &boxed<&bias_activation_backward>);
}

}  // namespace dsx
