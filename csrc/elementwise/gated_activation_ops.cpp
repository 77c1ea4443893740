// The torch side of gated_activation, for the device that this is compiled for. The schemas are in
// deepspeed_ext/ops/elementwise/gated_activation.py.
#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "elementwise/activation_ops.h"
#include "elementwise/gated_activation.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

#ifdef USE_CUDA
void run(const GatedActivation& call, int device) {
  const OnDevice on(device);
  gated_activation_cuda(call, on.stream);
}
void run(const GatedActivationBackward& call, int device) {
  const OnDevice on(device);
  gated_activation_backward_cuda(call, on.stream);
}
#else
void run(const GatedActivation& call, int /*device*/) { run_elements(call, &gated_activation_cpu); }
void run(const GatedActivationBackward& call, int /*device*/) {
  run_elements(call, &gated_activation_backward_cpu);
}
#endif

template <class Call>
void run_gated_activation(Call& call, int device, std::initializer_list<const Rows*> all) {
  if (call.rows == 0 || call.length == 0) return;
  join_rows(call, all);
  run(call, device);
}

// What an op is called with over halves of each row, the gates and what they are for.
template <class Call>
Call call_over_halves(const char* op, const TensorView& view, int64_t activation) {
  auto call = call_over<Call>(op, {"gate_up"}, view, activation);
  check(call.length % 2 == 0, op, ": gate_up has shape ", Integers{view.sizes, view.dim},
        ", expected a last dimension of even length");
  call.length /= 2;
  return call;
}

Tensor gated_activation(const Tensor& gate, const Tensor& up, int64_t activation) {
  constexpr const char* op = "gated_activation";
  const TensorView view(gate.get());
  auto call = call_over<GatedActivation>(op, {"gate"}, view, activation);
  RowReader reader(op);
  call.gate = reader.read({"gate"}, view);
  call.up = reader.read({"up"}, up, view);
  NewRows out(view, call.gate.dtype);
  call.out = out.rows;
  run_gated_activation(call, view.device_index, {&call.gate, &call.up, &call.out});
  return std::move(out.tensor);
}

Tensor gated_activation_packed(const Tensor& gate_up, int64_t activation, bool gate_last) {
  constexpr const char* op = "gated_activation";
  const TensorView view(gate_up.get());
  auto call = call_over_halves<GatedActivation>(op, view, activation);
  RowReader reader(op);
  const Rows both = reader.read({"gate_up"}, view);
  call.gate = both.from(gate_last ? call.length : 0);
  call.up = both.from(gate_last ? 0 : call.length);
  std::vector<int64_t> sizes(view.sizes, view.sizes + view.dim);
  sizes.back() = call.length;
  Tensor out = new_tensor(sizes.data(), view.dim, view.dtype, view);
  call.out = {out.data_ptr(), call.length, call.gate.dtype};
  run_gated_activation(call, view.device_index, {&call.gate, &call.up, &call.out});
  return out;
}

std::tuple<Tensor, Tensor> gated_activation_backward(const Tensor& grad_out, const Tensor& gate,
                                                     const Tensor& up, int64_t activation) {
  constexpr const char* op = "gated_activation_backward";
  const TensorView view(gate.get());
  auto call = call_over<GatedActivationBackward>(op, {"gate"}, view, activation);
  RowReader reader(op);
  call.gate = reader.read({"gate"}, view);
  call.up = reader.read({"up"}, up, view);
  call.grad_out = reader.read({"grad_out"}, grad_out, view);
  NewRows grad_gate(view, call.gate.dtype), grad_up(view, call.up.dtype);
  call.grad_gate = grad_gate.rows;
  call.grad_up = grad_up.rows;
  run_gated_activation(call, view.device_index,
                       {&call.gate, &call.up, &call.grad_out, &call.grad_gate, &call.grad_up});
  return {std::move(grad_gate.tensor), std::move(grad_up.tensor)};
}

Tensor gated_activation_packed_backward(const Tensor& grad_out, const Tensor& gate_up,
                                        int64_t activation, bool gate_last) {
  constexpr const char* op = "gated_activation_backward";
  const TensorView view(gate_up.get()), grad_view(grad_out.get());
  auto call = call_over_halves<GatedActivationBackward>(op, view, activation);
  RowReader reader(op);
  std::vector<int64_t> sizes(view.sizes, view.sizes + view.dim);
  sizes.back() = call.length;
  TensorView want = view;  // of grad_out
  want.sizes = sizes.data();
  check_device(op, {"grad_out"}, grad_view, view);
  check_shape(op, {"grad_out"}, grad_view, want);
  const Rows both = reader.read({"gate_up"}, view);
  call.gate = both.from(gate_last ? call.length : 0);
  call.up = both.from(gate_last ? 0 : call.length);
  call.grad_out = reader.read({"grad_out"}, grad_view);
  NewRows grad(view, call.gate.dtype);
  call.grad_gate = grad.rows.from(gate_last ? call.length : 0);
  call.grad_up = grad.rows.from(gate_last ? 0 : call.length);
  run_gated_activation(call, view.device_index, {&call.gate, &call.grad_out, &call.grad_gate});
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
