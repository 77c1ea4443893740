// Registers nhwc_bias_add, for the device that this is compiled for; the schemas are in
// deepspeed_ext/ops/elementwise/nhwc_bias_add.py.
#include "elementwise/elementwise_ops.h"
#include "elementwise/nhwc_bias_add.h"

namespace dsx {
namespace {

Tensor nhwc_bias_add(const Tensor& x, const Tensor& bias, const OptionalTensor& other,
                     const OptionalTensor& other_bias) {
  check(other.has_value() || !other_bias.has_value(), NhwcBiasAdd::kOp,
        ": other_bias is given, expected other beside it");
  if (!other.has_value()) {
    ElementwiseCall<NhwcBiasAddAlone> call({"x"}, x);
    call.read(0, {"x"}, x);
    call.read_bias(0, {"bias"}, bias);
    Tensor out = call.make(0, call.dtype(0));
    call.run();
    return out;
  }
  ElementwiseCall<NhwcBiasAdd> call({"x"}, x);
  call.read(0, {"x"}, x);
  call.read_bias(0, {"bias"}, bias);
  call.read(1, {"other"}, other);
  call.read_bias(1, {"other_bias"}, other_bias);
  Tensor out = call.make(0, call.dtype(0));
  call.run();
  return out;
}

// The gradient of a bias, of the dtype of that one.
Tensor nhwc_bias_add_backward(const Tensor& grad_out, const Tensor& bias) {
  ElementwiseCall<NhwcBiasAddBackward> call({"grad_out"}, grad_out);
  call.read(0, {"grad_out"}, grad_out);
  const Dtype dtype = storage_dtype(NhwcBiasAddBackward::kOp, {"bias"}, TensorView(bias.get()));
  Tensor grad_bias = call.make_sum(0, true, dtype);
  call.run();
  return grad_bias;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("nhwc_bias_add", &boxed<&nhwc_bias_add>);
  library.impl("nhwc_bias_add_backward", &boxed<&nhwc_bias_add_backward>);
}

}  // namespace dsx
