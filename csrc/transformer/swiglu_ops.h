// The torch side of swiglu that both devices share: checks, then tensors into the structs. `Device`
// is what swiglu_ops.cpp and swiglu_ops_cuda.cpp have one of each: run(call, device), for either
// struct, works things out or queues that.
#pragma once

#include "common/torch/arguments.h"
#include "common/torch/rows.h"
#include "transformer/swiglu.h"

namespace dsx {

using torch::stable::Tensor;

// Rows that all follow each other without a gap are as good as a single long one.
template <class Call>
void join_rows(Call& call, std::initializer_list<const Rows*> all) {
  for (const Rows* rows : all) {
    if (rows->pitch != call.length) return;
  }
  call.length *= call.rows;
  call.rows = 1;
}

template <class Device, class Call>
void run_swiglu(Call& call, int device, std::initializer_list<const Rows*> all) {
  if (call.rows == 0 || call.length == 0) return;
  join_rows(call, all);
  Device::run(call, device);
}

// Half of the last dimension, which must be even.
inline int64_t half_length(const char* op, const TensorView& view) {
  const RowShape shape(op, {"gate_up"}, view);
  check(shape.length % 2 == 0, op, ": gate_up has shape ", Integers{view.sizes, view.dim},
        ", expected a last dimension of even length");
  return shape.length / 2;
}

template <class Device>
Tensor swiglu(const Tensor& gate, const Tensor& up) {
  constexpr const char* op = "swiglu";
  const TensorView view(gate.get());
  const RowShape shape(op, {"gate"}, view);
  RowReader reader(op);
  Swiglu call = {};
  call.rows = shape.rows;
  call.length = shape.length;
  call.gate = reader.read({"gate"}, view);
  call.up = reader.read({"up"}, up, view);
  NewRows out(view, call.gate.dtype);
  call.out = out.rows;
  run_swiglu<Device>(call, view.device_index, {&call.gate, &call.up, &call.out});
  return std::move(out.tensor);
}

template <class Device>
Tensor swiglu_packed(const Tensor& gate_up) {
  constexpr const char* op = "swiglu";
  const TensorView view(gate_up.get());
  RowReader reader(op);
  Swiglu call = {};
  call.length = half_length(op, view);
  call.rows = RowShape(op, {"gate_up"}, view).rows;
  call.gate = reader.read({"gate_up"}, view);
  call.up = call.gate.from(call.length);
  std::vector<int64_t> sizes(view.sizes, view.sizes + view.dim);
  sizes.back() = call.length;
  Tensor out = new_tensor(sizes.data(), view.dim, view.dtype, view);
  call.out = {out.data_ptr(), call.length, call.gate.dtype};
  run_swiglu<Device>(call, view.device_index, {&call.gate, &call.up, &call.out});
  return out;
}

template <class Device>
std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad_out, const Tensor& gate,
                                           const Tensor& up) {
  constexpr const char* op = "swiglu_backward";
  const TensorView view(gate.get());
  const RowShape shape(op, {"gate"}, view);
  RowReader reader(op);
  SwigluBackward call = {};
  call.rows = shape.rows;
  call.length = shape.length;
  call.gate = reader.read({"gate"}, view);
  call.up = reader.read({"up"}, up, view);
  call.grad_out = reader.read({"grad_out"}, grad_out, view);
  NewRows grad_gate(view, call.gate.dtype), grad_up(view, call.up.dtype);
  call.grad_gate = grad_gate.rows;
  call.grad_up = grad_up.rows;
  run_swiglu<Device>(call, view.device_index,
                     {&call.gate, &call.up, &call.grad_out, &call.grad_gate, &call.grad_up});
  return {std::move(grad_gate.tensor), std::move(grad_up.tensor)};
}

template <class Device>
Tensor swiglu_packed_backward(const Tensor& grad_out, const Tensor& gate_up) {
  constexpr const char* op = "swiglu_backward";
  const TensorView view(gate_up.get()), grad_view(grad_out.get());
  RowReader reader(op);
  SwigluBackward call = {};
  call.length = half_length(op, view);
  call.rows = RowShape(op, {"gate_up"}, view).rows;
  std::vector<int64_t> sizes(view.sizes, view.sizes + view.dim);
  sizes.back() = call.length;
  TensorView want = view;  // of grad_out
  want.sizes = sizes.data();
  check_device(op, {"grad_out"}, grad_view, view);
  check_shape(op, {"grad_out"}, grad_view, want);
  call.gate = reader.read({"gate_up"}, view);
  call.up = call.gate.from(call.length);
  call.grad_out = reader.read({"grad_out"}, grad_view);
  NewRows grad(view, call.gate.dtype);
  call.grad_gate = grad.rows;
  call.grad_up = grad.rows.from(call.length);
  run_swiglu<Device>(call, view.device_index, {&call.gate, &call.grad_out, &call.grad_gate});
  return std::move(grad.tensor);
}

}  // namespace dsx
