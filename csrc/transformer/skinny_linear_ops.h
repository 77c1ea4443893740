// The torch side of skinny_linear that both devices share: checks, then tensors into the struct.
// `Device` is what skinny_linear_ops.cpp and skinny_linear_ops_cuda.cpp have one of each:
// run(SkinnyLinear, device) works it out, or queues that.
#pragma once

#include "common/torch/few_rows.h"
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

template <class Device>
Tensor multiplied(FewRowsReader<SkinnyLinear>& reader, const char* op, const Tensor& weight) {
  const TensorView view(weight.get());
  SkinnyLinear& call = reader.call;
  call.weight = weight_rows(op, view, reader.x(), call.length);
  reader.check_dtype({"weight"}, call.weight);
  return reader.finish("weight", view.sizes[0], &Device::run);
}

template <class Device>
Tensor skinny_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const OptionalTensor& residual, std::optional<int64_t> activation,
                     bool gated) {
  constexpr const char* op = "skinny_linear";
  FewRowsReader<SkinnyLinear> reader(op, x, {bias, residual, activation, gated});
  return multiplied<Device>(reader, op, weight);
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> skinny_linear_norm(const Tensor& x, const Tensor& weight,
                                                      const OptionalTensor& bias,
                                                      const OptionalTensor& residual,
                                                      const OptionalTensor& squares,
                                                      const OptionalTensor& norm_weight,
                                                      std::optional<int64_t> activation, bool gated,
                                                      double eps, double weight_offset) {
  const char* const op =
      norm_weight ? "skinny_linear_norm" : "skinny_linear";  // the function's name
  FewRowsReader<SkinnyLinear> reader(op, x, {bias, residual, activation, gated},
                                     {squares, norm_weight, eps, weight_offset});
  return reader.with_norm(multiplied<Device>(reader, op, weight));
}

template <class Device, class Library>
void register_skinny_linear(Library& library) {
  library.impl("skinny_linear", &boxed<&skinny_linear<Device>>);
  library.impl("skinny_linear_norm", &boxed<&skinny_linear_norm<Device>>);
}

}  // namespace dsx
