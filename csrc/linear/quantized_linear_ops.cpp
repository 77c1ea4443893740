// The torch side of quantized_linear and unpack_weight for codes of DSX_BITS, for the device that
// this is compiled for. The schemas are in deepspeed_ext/ops/quantization/.
#include "common/torch/device.h"
#include "linear/few_rows_ops.h"
#include "linear/quantized_linear.h"
#ifdef USE_CUDA
#include "linear/few_rows_ops_cuda.h"
#else
#include "linear/few_rows_ops_cpu.h"
#endif

namespace dsx {
namespace {

using torch::stable::Tensor;

constexpr const char* kQuantizedLinear =
    DSX_BITS == 4 ? "quantized_linear.w4" : "quantized_linear.w8";
constexpr const char* kQuantizedLinearNorm =
    DSX_BITS == 4 ? "quantized_linear_norm.w4" : "quantized_linear_norm.w8";
constexpr const char* kUnpackWeight = DSX_BITS == 4 ? "unpack_weight.w4" : "unpack_weight.w8";

// The tensors that a packed weight is made of, and its numbers, for an op of this name.
class PackedWeightReader {
 public:
  PackedWeight weight = {};

  PackedWeightReader(const char* op, const TensorView& codes, int64_t format, int64_t group_size,
                     int64_t length)
      : op_(op), codes_(codes) {
    const bool known = format >= 0 && format < kQuantFormats &&
                       QuantFormat(format) != QuantFormat::fp8_e4m3 &&
                       QuantFormat(format) != QuantFormat::fp8_e5m2 &&
                       bits_of_code(QuantFormat(format)) == DSX_BITS;
    check(known, op, ": format is ", format, ", expected ",
          DSX_BITS == 4 ? "1 or 2, which have 4 bits" : "0, which has 8 bits");
    weight.format = QuantFormat(format);
    weight.length = length;
    check(length >= 0, op, ": length is ", length, ", expected 0 or more");
    check(group_size > 0 && group_size <= std::max<int64_t>(1, length), op, ": group_size is ",
          group_size, ", expected 1 to ", length, ", the length");
    weight.group = group_size;
    weight.row_bytes =
        (length / kElementsOfLine + (length % kElementsOfLine != 0)) * kPackedLineBytes;
    read_codes();
  }

  void read_scales(const TensorView& scales) {
    weight.scales = read_floats({"scales"}, scales);
    weight.scale_pitch = padded_rows();
  }

  void read_offsets(const OptionalTensor& offsets) {
    if (!offsets.has_value()) return;
    check(weight.format != QuantFormat::nf4, op_,
          ": offsets is a tensor, expected None, as nf4 is symmetric");
    weight.offsets = read_floats({"offsets"}, TensorView(offsets->get()));
  }

 private:
  static constexpr int64_t kElementsOfLine = kPackedLineBytes * 8 / DSX_BITS;

  int64_t padded_rows() const { return (weight.rows + 3) / 4 * 4; }

  void check_contiguous(const Item& item, const TensorView& view) const {
    check(view.is_contiguous(), op_, ": ", item, " has strides ", Integers{view.strides, view.dim},
          ", expected a contiguous tensor");
    check_memory(op_, item, view);
  }

  void read_codes() {
    const Item item{"codes"};
    check(codes_.dtype == aoti_torch_dtype_uint8(), op_, ": ", item, " is ",
          DtypeCode{codes_.dtype}, ", expected uint8");
    check(codes_.dim == 2 && codes_.sizes[1] == weight.row_bytes, op_, ": ", item, " has shape ",
          Integers{codes_.sizes, codes_.dim}, ", expected two dimensions, the last one of ",
          weight.row_bytes, " bytes for length ", weight.length);
    check_contiguous(item, codes_);
    weight.codes = reinterpret_cast<const uint8_t*>(codes_.data);
    weight.rows = codes_.sizes[0];
  }

  const float* read_floats(const Item& item, const TensorView& view) const {
    check_device(op_, item, view, codes_);
    check_dtype(op_, item, view, Dtype::float32);
    const int64_t want[] = {weight.groups(), padded_rows()};
    check(view.dim == 2 && view.sizes[0] == want[0] && view.sizes[1] == want[1], op_, ": ", item,
          " has shape ", Integers{view.sizes, view.dim}, ", expected ", Integers{want, 2});
    check_contiguous(item, view);
    return reinterpret_cast<const float*>(view.data);
  }

  const char* const op_;
  const TensorView codes_;
};

// The packed weight as its tensors and numbers come.
struct PackedArguments {
  const Tensor &codes, &scales;
  const OptionalTensor& offsets;
  int64_t format, group_size;
};

#ifdef USE_CUDA
void run(const QuantizedLinear& call, int device) {
  const OnDevice on(device);
  const int64_t bytes = quantized_workspace_bytes(call);
  std::optional<Tensor> workspace;
  if (bytes > 0) workspace = cuda_workspace(bytes, device);
  quantized_linear_cuda(WithInverses(call, device).call,
                        workspace ? workspace->data_ptr() : nullptr, on.stream);
}

void unpack(const PackedWeight& weight, const Rows& out, int device) {
  const OnDevice on(device);
  unpack_weight_cuda(weight, out, on.stream);
}
#else
void run(const QuantizedLinear& call, int /*device*/) {
  const bool vnni = current_vnni();
  divide_columns(call, [&](Isa isa, int64_t begin, int64_t end) {
    quantized_linear_cpu(isa, vnni, call, begin, end);
  });
}

void unpack(const PackedWeight& weight, const Rows& out, int /*device*/) {
  in_parallel(weight.rows, weight.length, kProductsOfThread,
              [&](Isa isa, int64_t begin, int64_t end) {
    unpack_weight_cpu(isa, weight, out, begin, end);
  });
}
#endif

Tensor multiplied(FewRowsReader<QuantizedLinear>& reader, const char* op,
                  const PackedArguments& weight, bool integer) {
  const TensorView codes_view(weight.codes.get());
  check_device(op, {"codes"}, codes_view, reader.x());
  PackedWeightReader packed(op, codes_view, weight.format, weight.group_size, reader.call.length);
  packed.read_scales(TensorView(weight.scales.get()));
  packed.read_offsets(weight.offsets);
  reader.call.weight = packed.weight;
  reader.call.integer = integer;
  check(!integer || packed.weight.format != QuantFormat::nf4, op,
        ": input_format is 'int8', expected None with nf4, whose levels are no integers");
  return reader.finish("codes", packed.weight.rows, &run);
}

Tensor quantized_linear(const Tensor& x, const Tensor& codes, const Tensor& scales,
                        const OptionalTensor& offsets, const OptionalTensor& bias,
                        const OptionalTensor& residual, int64_t format, int64_t group_size,
                        std::optional<int64_t> activation, bool gated, bool integer) {
  constexpr const char* op = "quantized_linear";
  FewRowsReader<QuantizedLinear> reader(op, x, {bias, residual, activation, gated});
  return multiplied(reader, op, {codes, scales, offsets, format, group_size}, integer);
}

std::tuple<Tensor, Tensor, Tensor> quantized_linear_norm(
    const Tensor& x, const Tensor& codes, const Tensor& scales, const OptionalTensor& offsets,
    const OptionalTensor& bias, const OptionalTensor& residual, const OptionalTensor& squares,
    const OptionalTensor& norm_weight, int64_t format, int64_t group_size,
    std::optional<int64_t> activation, bool gated, bool integer, double eps, double weight_offset) {
  const char* const op =
      norm_weight ? "quantized_linear_norm" : "quantized_linear";  // the function's name
  FewRowsReader<QuantizedLinear> reader(op, x, {bias, residual, activation, gated},
                                        {squares, norm_weight, eps, weight_offset});
  const PackedArguments weight{codes, scales, offsets, format, group_size};
  return reader.with_norm(multiplied(reader, op, weight, integer));
}

Tensor unpack_weight(const Tensor& codes, const Tensor& scales, const OptionalTensor& offsets,
                     int64_t format, int64_t group_size, int64_t length, int64_t dtype) {
  constexpr const char* op = "unpack_weight";
  const TensorView view(codes.get());
  PackedWeightReader packed(op, view, format, group_size, length);
  packed.read_scales(TensorView(scales.get()));
  packed.read_offsets(offsets);
  check(dtype >= 0 && dtype <= 2, op, ": dtype is ", dtype, ", expected a number from 0 to 2");
  const int64_t sizes[] = {packed.weight.rows, length};
  TensorView out_view = view;  // what the result is like
  out_view.sizes = sizes;
  out_view.numel = sizes[0] * sizes[1];
  NewRows out(out_view, Dtype(dtype));
  if (out_view.numel > 0) unpack(packed.weight, out.rows, view.device_index);
  return std::move(out.tensor);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl(kQuantizedLinear, &boxed<&quantized_linear>);
  library.impl(kQuantizedLinearNorm, &boxed<&quantized_linear_norm>);
  library.impl(kUnpackWeight, &boxed<&unpack_weight>);
}

}  // namespace dsx
