// The torch side of gated_activation, for the device that this is compiled for. The schemas are in
// deepspeed_ext/ops/elementwise/gated_activation.py.
#include "common/torch/activation.h"
#include "elementwise/elementwise_ops.h"
#include "elementwise/gated_activation.h"

namespace dsx {
namespace {

Tensor gated_activation(const Tensor& gate, const Tensor& up, int64_t activation) {
  ElementwiseCall<GatedActivation> call({"gate"}, gate);
  call.rule().activation = activation_of(GatedActivation::kOp, activation);
  call.read(0, {"gate"}, gate);
  call.read(1, {"up"}, up);
  Tensor out = call.make(0, call.dtype(0));
  call.run();
  return out;
}

// Rows that have gates in one half and what they are for in the other.
struct Halves {
  Rows gate, up;

  Halves(const Rows& both, int64_t length, bool gate_last)
      : gate(both.from(gate_last ? length : 0)), up(both.from(gate_last ? 0 : length)) {}
};

Tensor gated_activation_packed(const Tensor& gate_up, int64_t activation, bool gate_last) {
  ElementwiseCall<GatedActivation> call({"gate_up"}, gate_up, 2);
  call.rule().activation = activation_of(GatedActivation::kOp, activation);
  const Halves halves(call.read_like({"gate_up"}), call.length(), gate_last);
  call.take(0, halves.gate);
  call.take(1, halves.up);
  Tensor out = call.make(0, halves.gate.dtype);
  call.run();
  return out;
}

std::tuple<Tensor, Tensor> gated_activation_backward(const Tensor& grad_out, const Tensor& gate,
                                                     const Tensor& up, int64_t activation) {
  ElementwiseCall<GatedActivationBackward> call({"gate"}, gate);
  call.rule().activation = activation_of(GatedActivationBackward::kOp, activation);
  call.read(0, {"gate"}, gate);
  call.read(1, {"up"}, up);
  call.read(2, {"grad_out"}, grad_out);
  Tensor grad_gate = call.make(0, call.dtype(0));
  Tensor grad_up = call.make(1, call.dtype(1));
  call.run();
  return {std::move(grad_gate), std::move(grad_up)};
}

Tensor gated_activation_packed_backward(const Tensor& grad_out, const Tensor& gate_up,
                                        int64_t activation, bool gate_last) {
  ElementwiseCall<GatedActivationBackward> call({"gate_up"}, gate_up, 2);
  call.rule().activation = activation_of(GatedActivationBackward::kOp, activation);
  call.read_part(2, {"grad_out"}, grad_out);
  const Halves halves(call.read_like({"gate_up"}), call.length(), gate_last);
  call.take(0, halves.gate);
  call.take(1, halves.up);
  NewRows grad(call.like(), halves.gate.dtype);
  const Halves grads(grad.rows, call.length(), gate_last);
  call.give(0, grads.gate);
  call.give(1, grads.up);
  call.run();
  return std::move(grad.tensor);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("gated_activation", &boxed<&gated_activation>);
  library.impl("gated_activation.packed", &boxed<&gated_activation_packed>);
  library.impl("gated_activation_backward", &boxed<&gated_activation_backward>);
  library.impl("gated_activation_backward.packed", &boxed<&gated_activation_packed_backward>);
}

}  // namespace dsx
