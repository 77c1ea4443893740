// The torch side of skinny_linear, for the device that this is compiled for. The schema is in
// deepspeed_ext/ops/linear/skinny_linear.py.
#include "common/torch/device.h"
#include "linear/few_rows_ops.h"
#include "linear/skinny_linear.h"
#ifdef USE_CUDA
#include "linear/few_rows_ops_cuda.h"
#else
#include "linear/few_rows_ops_cpu.h"
#endif

namespace dsx {
namespace {

using torch::stable::Tensor;

// The weight is read as it lies, or not at all: a copy in each call would cost more than all the
// rest.
Rows weight_rows(const char* op, const TensorView& view, const TensorView& x, int64_t length) {
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

#ifdef USE_CUDA
void run(const SkinnyLinear& call, int device) {
  const OnDevice on(device);
  skinny_linear_cuda(WithInverses(call, device).call, on.stream);
}
#else
void run(const SkinnyLinear& call, int /*device*/) {
  divide_columns(
      call, [&](Isa isa, int64_t begin, int64_t end) { skinny_linear_cpu(isa, call, begin, end); });
}
#endif

Tensor multiplied(FewRowsReader<SkinnyLinear>& reader, const char* op, const Tensor& weight) {
  const TensorView view(weight.get());
  SkinnyLinear& call = reader.call;
  call.weight = weight_rows(op, view, reader.x(), call.length);
  reader.check_dtype({"weight"}, call.weight);
  return reader.finish("weight", view.sizes[0], &run);
}

Tensor skinny_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const OptionalTensor& residual, std::optional<int64_t> activation,
                     bool gated) {
  constexpr const char* op = "skinny_linear";
  FewRowsReader<SkinnyLinear> reader(op, x, {bias, residual, activation, gated});
  return multiplied(reader, op, weight);
}

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
  return reader.with_norm(multiplied(reader, op, weight));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("skinny_linear", &boxed<&skinny_linear>);
  library.impl("skinny_linear_norm", &boxed<&skinny_linear_norm>);
}

}  // namespace dsx
