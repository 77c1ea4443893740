// The torch side of grouped_quantized_linear for few rows, for codes of DSX_BITS and the device
// that this is compiled for. The schema is in deepspeed_ext/ops/linear/grouped_quantized_linear.py.
#include "common/torch/device.h"
#include "linear/grouped_quantized.h"
#include "linear/grouped_rows_ops.h"
#include "linear/packed_weight_ops.h"
#ifndef USE_CUDA
#include "linear/grouped_rows_ops_cpu.h"
#endif

namespace dsx {
namespace {

using torch::stable::Tensor;

constexpr const char* kOp = "grouped_quantized_linear";
constexpr const char* kOverload =
    DSX_BITS == 4 ? "grouped_quantized_linear.w4" : "grouped_quantized_linear.w8";

#ifdef USE_CUDA
void run(const GroupedQuantized& call, const PartsOfExperts& /*parts*/, int device) {
  const OnDevice on(device);
  const int64_t bytes = grouped_workspace_bytes(call);
  std::optional<Tensor> workspace;
  if (bytes > 0) workspace = cuda_workspace(bytes, device);
  grouped_quantized_cuda(call, workspace ? workspace->data_ptr() : nullptr, on.stream);
}
#else
void run(const GroupedQuantized& call, const PartsOfExperts& parts, int /*device*/) {
  const bool vnni = current_vnni();
  divide_parts(call, parts, [&](Isa isa, const RowsOfExpert& part, int64_t begin, int64_t end) {
    grouped_quantized_cpu(isa, vnni, call, part, begin, end);
  });
}
#endif

Tensor grouped_quantized_linear(const Tensor& x, const Tensor& codes, const Tensor& scales,
                                const OptionalTensor& weight_offsets, const Tensor& offsets,
                                const OptionalTensor& bias, const OptionalTensor& slots,
                                int64_t format, int64_t group_size,
                                std::optional<int64_t> activation, bool gated, bool integer) {
  GroupedRowsReader<GroupedQuantized> reader(kOp, x, {offsets, bias, slots, activation, gated});
  const TensorView codes_view(codes.get());
  check_device(kOp, {"codes"}, codes_view, reader.x());
  PackedWeightReader packed(kOp, codes_view, format, group_size, reader.call.length);
  packed.read_scales(TensorView(scales.get()));
  packed.read_offsets({"weight_offsets"}, weight_offsets);
  reader.call.weight = packed.weight;
  reader.call.integer = integer;
  check(!integer || packed.weight.format != QuantFormat::nf4, kOp,
        ": input_format is 'int8', expected None with nf4, whose levels are no integers");
  const TensorView ends(offsets.get());
  const int64_t experts = ends.dim == 1 ? ends.sizes[0] : 0, rows = packed.weight.rows;
  check(experts > 0, kOp, ": offsets has shape ", Integers{ends.sizes, ends.dim},
        ", expected a number for each expert, one at least");
  check(rows % experts == 0, kOp, ": codes has ", rows, " rows, expected as many for each of ",
        experts, " experts");
  return reader.finish("codes", experts, rows / experts, &run);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl(kOverload, &boxed<&grouped_quantized_linear>);
}

}  // namespace dsx
