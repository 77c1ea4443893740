// The torch side of quantized_linear and unpack_weight for codes of DSX_BITS, for the device that
// this is compiled for. The schemas are in deepspeed_ext/ops/quantization/.
#include "common/torch/device.h"
#include "linear/few_rows_ops.h"
#include "linear/packed_weight_ops.h"
#include "linear/quantized_linear.h"
#ifdef USE_CUDA
#include "linear/few_rows_ops_cuda.h"
#include "linear/quantized_many_rows.h"
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
[[maybe_unused]] constexpr const char* kQuantizedProduct =
    DSX_BITS == 4 ? "quantized_product.w4" : "quantized_product.w8";
constexpr const char* kUnpackWeight = DSX_BITS == 4 ? "unpack_weight.w4" : "unpack_weight.w8";

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

// Tensors as the copy engine takes them, which are copied if they are not; keeps the copies.
class Aligned {
 public:
  template <class T>
  const T* contiguous(const T* data, const TensorView& view) {
    return fits(data, 0) ? data : static_cast<const T*>(copy(view));
  }
  Rows rows(const Rows& rows, const TensorView& view) {
    const int64_t pitch = rows.pitch * bytes_of(rows.dtype);
    if (rows.group == 0 && pitch >= 0 && fits(rows.data, pitch)) return rows;
    return {copy(view), view.sizes[view.dim - 1], rows.dtype};
  }

 private:
  static bool fits(const void* data, int64_t pitch) {
    return (reinterpret_cast<uintptr_t>(data) | uint64_t(pitch)) % kRunBytes == 0;
  }
  void* copy(const TensorView& view) {
    copies_.push_back(contiguous_copy(view));
    return copies_.back().data_ptr();
  }

  std::vector<Tensor> copies_;
};

// As many skinny GEMMs as it takes.
void run_by_few_rows(const QuantizedManyRows& many, int device) {
  QuantizedLinear call = {};
  call.columns = many.weight.rows;
  call.length = many.weight.length;
  call.bias = many.bias;
  call.weight = many.weight;
  for (int64_t first = 0; first < many.rows; first += kMostRows) {
    const auto further = [&](Rows rows) {
      rows.data = static_cast<char*>(rows.data) + first * rows.pitch * bytes_of(rows.dtype);
      return rows;
    };
    call.rows = std::min(kMostRows, many.rows - first);
    call.x = further(many.x);
    call.out = further(many.out);
    run(call, device);
  }
}

// What quantized_linear calls for more rows; an error names that.
Tensor quantized_product(const Tensor& x, const Tensor& codes, const Tensor& scales,
                         const OptionalTensor& offsets, const OptionalTensor& bias, int64_t format,
                         int64_t group_size) {
  constexpr const char* op = "quantized_linear";
  const TensorView view(x.get()), codes_view(codes.get());
  const RowShape shape(op, {"x"}, view);
  RowReader reader(op);
  QuantizedManyRows call = {};
  call.rows = shape.rows;
  call.x = reader.read({"x"}, view);
  check_device(op, {"codes"}, codes_view, view);
  PackedWeightReader packed(op, codes_view, format, group_size, shape.length);
  packed.read_scales(TensorView(scales.get()));
  packed.read_offsets({"offsets"}, offsets);
  call.weight = packed.weight;
  call.bias = reader.read_vector({"bias"}, bias, call.weight.rows, view);
  check(!call.bias.is_present() || call.bias.dtype == call.x.dtype, op, ": bias is ",
        call.bias.dtype, ", expected ", call.x.dtype);
  check(shape.length > 0 && takes_many_rows(call.weight, call.x.dtype), op,
        ": x, format and group_size are not those of a kernel, expected what it takes");
  std::vector<int64_t> sizes(view.sizes, view.sizes + view.dim);
  sizes.back() = call.weight.rows;
  TensorView out_view = view;  // what the result is like
  out_view.sizes = sizes.data();
  out_view.numel = call.rows * call.weight.rows;
  NewRows out(out_view, call.x.dtype);
  call.out = out.rows;
  if (out_view.numel == 0) return std::move(out.tensor);
  const OnDevice on(view.device_index);
  Aligned aligned;
  call.x = aligned.rows(call.x, view);
  call.weight.codes = aligned.contiguous(call.weight.codes, codes_view);
  call.weight.scales = aligned.contiguous(call.weight.scales, TensorView(scales.get()));
  if (offsets) {
    call.weight.offsets = aligned.contiguous(call.weight.offsets, TensorView(offsets->get()));
  }
  if (!quantized_many_rows_cuda(call, on.stream)) run_by_few_rows(call, view.device_index);
  return std::move(out.tensor);
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
  packed.read_offsets({"offsets"}, weight.offsets);
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
  packed.read_offsets({"offsets"}, offsets);
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
#ifdef USE_CUDA
  library.impl(kQuantizedProduct, &boxed<&quantized_product>);
#endif
}

}  // namespace dsx
