// The torch side of grouped_linear for few rows, for the device that this is compiled for. The
// schema is in deepspeed_ext/ops/linear/grouped_linear.py.
#include "common/torch/device.h"
#include "linear/grouped_linear.h"
#include "linear/grouped_rows_ops.h"
#ifndef USE_CUDA
#include "linear/grouped_rows_ops_cpu.h"
#endif

namespace dsx {
namespace {

using torch::stable::Tensor;

constexpr const char* kOp = "grouped_linear";

// The weights are read as they lie, or not at all.
Rows weight_rows(const TensorView& view, const TensorView& x, int64_t length) {
  const Item item{"weight"};
  check_device(kOp, item, view, x);
  check(view.dim == 3 && view.sizes[2] == length, kOp, ": ", item, " has shape ",
        Integers{view.sizes, view.dim}, ", expected three dimensions, the last one of ", length);
  check(length < 2 || view.strides[2] == 1, kOp, ": ", item, " has strides ",
        Integers{view.strides, view.dim}, ", expected 1 along the last dimension");
  check_memory(kOp, item, view);
  const Dtype dtype = storage_dtype(kOp, item, view);
  if (view.numel == 0) return {nullptr, 0, dtype};
  return {view.data, view.strides[1], dtype, view.sizes[1], view.strides[0]};
}

#ifdef USE_CUDA
void run(const GroupedLinear& call, const PartsOfExperts& /*parts*/, int device) {
  const OnDevice on(device);
  const int64_t bytes = grouped_workspace_bytes(call);
  std::optional<Tensor> workspace;
  if (bytes > 0) workspace = cuda_workspace(bytes, device);
  grouped_linear_cuda(call, workspace ? workspace->data_ptr() : nullptr, on.stream);
}
#else
void run(const GroupedLinear& call, const PartsOfExperts& parts, int /*device*/) {
  divide_parts(call, parts, [&](Isa isa, const RowsOfExpert& part, int64_t begin, int64_t end) {
    grouped_linear_cpu(isa, call, part, begin, end);
  });
}
#endif

Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                      const OptionalTensor& bias, const OptionalTensor& slots,
                      std::optional<int64_t> activation, bool gated) {
  GroupedRowsReader<GroupedLinear> reader(kOp, x, {offsets, bias, slots, activation, gated});
  const TensorView view(weight.get());
  reader.call.weight = weight_rows(view, reader.x(), reader.call.length);
  reader.check_dtype({"weight"}, reader.call.weight);
  return reader.finish("weight", view.sizes[0], view.sizes[1], &run);
}

#ifdef USE_CUDA
void grouped_linear_clear(const Tensor& rows, const Tensor& offsets) {
  const TensorView view(rows.get());
  const WholeNumbers ends(kOp, {"offsets"}, offsets, aoti_torch_dtype_int32(), view);
  check(view.dim == 2 && view.is_contiguous(), kOp, ": rows has shape ",
        Integers{view.sizes, view.dim}, ", expected rows and columns in one piece");
  check(ends.view.dim == 1 && ends.view.numel > 0, kOp, ": offsets has shape ",
        Integers{ends.view.sizes, ends.view.dim},
        ", expected a number for each expert, one at least");
  check(view.sizes[0] <= INT32_MAX, kOp, ": rows has ", view.sizes[0], " rows, expected ",
        INT32_MAX, " at the most");
  check_memory(kOp, {"rows"}, view);
  if (view.numel == 0) return;
  const Rows all{view.data, view.sizes[1], storage_dtype(kOp, {"rows"}, view)};
  const OnDevice on(view.device_index);
  clear_rows_cuda(all, view.sizes[0], view.sizes[1], ends.numbers<int32_t>() + ends.view.numel - 1,
                  on.stream);
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
#ifdef USE_CUDA
  library.impl("grouped_linear_clear_", &boxed<&grouped_linear_clear>);
#endif
  library.impl("grouped_linear.few", &boxed<&grouped_linear>);
}

}  // namespace dsx
