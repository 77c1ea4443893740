// The torch side of skinny_linear that both devices share: checks, then tensors into the struct.
// `Device` is what skinny_linear_ops.cpp and skinny_linear_ops_cuda.cpp have one of each:
// run(SkinnyLinear, device) works it out, or queues that.
#pragma once

#include "common/torch/arguments.h"
#include "transformer/activation_ops.h"
#include "transformer/skinny_linear.h"

namespace dsx {

using torch::stable::Tensor;

// The weight is read as it lies, or not at all: a copy in each call would cost more than all the
// rest.
inline Rows weight_rows(const char* op, const TensorView& view, const TensorView& x,
                        int64_t length) {
  const Item item{"weight"};
  check_device(op, item, view, x);
  check(view.dim == 2 && view.sizes[1] == length, op, ": ", item, " has shape ",
        Integers{view.sizes, view.dim}, ", expected two dimensions, the last one of ", length);
  const bool in_one_piece = view.sizes[1] < 2 || view.strides[1] == 1;
  check(in_one_piece, op, ": ", item, " has strides ", Integers{view.strides, view.dim},
        ", expected 1 along the last dimension; call .contiguous() once, not in each call");
  check_memory(op, item, view);
  return {view.data, view.strides[0], storage_dtype(op, item, view)};
}

inline void check_same_dtype(const char* op, const Item& item, const Rows& got, Dtype want) {
  check(got.data == nullptr || got.dtype == want, op, ": ", item, " is ", got.dtype, ", expected ",
        want);
}

template <class Device>
Tensor skinny_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const OptionalTensor& residual, std::optional<int64_t> activation,
                     bool gated) {
  constexpr const char* op = "skinny_linear";
  const TensorView view(x.get()), weight_view(weight.get());
  const RowShape shape(op, {"x"}, view);
  check(shape.rows <= kMostRows, op, ": x has shape ", Integers{view.sizes, view.dim},
        ", expected at most ", kMostRows, " rows");
  SkinnyLinear call = {};
  call.rows = shape.rows;
  call.length = shape.length;
  call.activated = activation.has_value();
  if (call.activated) call.activation = activation_of(op, *activation);
  check(call.activated || !gated, op, ": gated is True, expected an activation beside it");
  call.gated = gated;
  RowReader reader(op);
  call.x = reader.read({"x"}, view);
  call.weight = weight_rows(op, weight_view, view, call.length);
  check(!gated || weight_view.sizes[0] % 2 == 0, op, ": weight has shape ",
        Integers{weight_view.sizes, weight_view.dim},
        ", expected an even number of rows, as gated is True");
  call.columns = weight_view.sizes[0] / (gated ? 2 : 1);
  call.bias = reader.read_vector({"bias"}, bias, weight_view.sizes[0], view);

  std::vector<int64_t> sizes(view.sizes, view.sizes + view.dim);
  sizes.back() = call.columns;
  TensorView out_view = view;  // what the result is like
  out_view.sizes = sizes.data();
  out_view.numel = call.rows * call.columns;
  call.residual = reader.read({"residual"}, residual, out_view);
  const Dtype dtype = call.x.dtype;
  check(call.weight.dtype == dtype, op, ": weight is ", call.weight.dtype, ", expected ", dtype);
  check_same_dtype(op, {"bias"}, call.bias, dtype);
  check_same_dtype(op, {"residual"}, call.residual, dtype);
  NewRows out(out_view, dtype);
  call.out = out.rows;
  if (out_view.numel > 0) Device::run(call, view.device_index);
  return std::move(out.tensor);
}

}  // namespace dsx
