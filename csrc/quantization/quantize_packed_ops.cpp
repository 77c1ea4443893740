// The torch side of quantize_packed_, for the device that this is compiled for. The schema is in
// deepspeed_ext/ops/quantization/.
#include <algorithm>

#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "quantization/groups_ops.h"
#include "quantization/quantize_packed.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

// The tensors that are written, and what they must be like beside x.
class PackedResults {
 public:
  PackedResults(const char* op, const TensorView& x, QuantizePacked& call)
      : op_(op), x_(x), call_(call), tensors_(op, 5) {
    const int64_t bits = bits_of_code(call.format) * call.length;
    call.row_bytes = ceil_div(bits, 8 * kPackedLineBytes) * kPackedLineBytes;
    tensors_.add({"x"}, x, Use::read);
  }

  void read_codes(const TensorView& codes) {
    check(codes.dtype == aoti_torch_dtype_uint8(), op_, ": codes is ", DtypeCode{codes.dtype},
          ", expected uint8");
    check_sizes({"codes"}, codes, call_.rows, call_.row_bytes);
    check_contiguous({"codes"}, codes);
    tensors_.add({"codes"}, codes, Use::write);
    call_.codes = reinterpret_cast<uint8_t*>(codes.data);
  }

  void read_scales(const TensorView& scales, const OptionalTensor& offsets) {
    call_.scales = read_of_groups({"scales"}, scales);
    call_.scale_pitch = scales.strides[0];
    if (!offsets.has_value()) return;
    const TensorView view(offsets->get());
    call_.offsets = read_of_groups({"offsets"}, view);
    check_layout(op_, {"offsets"}, view, scales);
  }

  void read_errors(const OptionalTensor& errors) {
    if (!errors.has_value()) return;
    const TensorView view(errors->get());
    check(view.dtype == aoti_torch_dtype_float64(), op_, ": errors is ", DtypeCode{view.dtype},
          ", expected float64");
    check_sizes({"errors"}, view, call_.rows, kRowErrors);
    check_contiguous({"errors"}, view);
    tensors_.add({"errors"}, view, Use::write);
    call_.errors = reinterpret_cast<double*>(view.data);
  }

 private:
  // Groups may be further apart, as in part of a larger tensor.
  float* read_of_groups(const Item& item, const TensorView& view) {
    check_dtype(op_, item, view, Dtype::float32);
    const int64_t padded = call_.padded_rows();
    check_sizes(item, view, call_.columns(), padded);
    const bool in_rows = view.numel == 0 || (view.strides[1] == 1 &&
                                             (view.sizes[0] == 1 || view.strides[0] >= padded));
    check(in_rows, op_, ": ", item, " has strides ", Integers{view.strides, view.dim},
          " for shape ", Integers{view.sizes, view.dim},
          ", expected groups one after the other, each contiguous");
    tensors_.add(item, view, Use::write);
    return reinterpret_cast<float*>(view.data);
  }

  void check_sizes(const Item& item, const TensorView& view, int64_t first, int64_t second) const {
    const int64_t want[] = {first, second};
    check_device(op_, item, view, x_);
    check(view.dim == 2 && view.sizes[0] == first && view.sizes[1] == second, op_, ": ", item,
          " has shape ", Integers{view.sizes, view.dim}, ", expected ", Integers{want, 2});
  }

  void check_contiguous(const Item& item, const TensorView& view) const {
    check(view.is_contiguous(), op_, ": ", item, " has strides ", Integers{view.strides, view.dim},
          " for shape ", Integers{view.sizes, view.dim}, ", expected a contiguous tensor");
  }

  const char* const op_;
  const TensorView& x_;
  QuantizePacked& call_;
  SeparateTensors tensors_;
};

#ifdef USE_CUDA
void run(const QuantizePacked& call, int device) {
  const OnDevice on(device);
  quantize_packed_cuda(call, on.stream);
}
#else
constexpr int64_t kElementsPerThread = 32768;  // some 20 us: less is not worth a thread

void run(const QuantizePacked& call, int /*device*/) {
  in_parallel(
      call.rows, call.padded_length(), kElementsPerThread,
      [&](Isa isa, int64_t begin, int64_t end) { quantize_packed_cpu(isa, call, begin, end); });
}
#endif

void quantize_packed_(const Tensor& x, const Tensor& codes, const Tensor& scales,
                      const OptionalTensor& offsets, const OptionalTensor& errors, int64_t format,
                      int64_t group_size) {
  constexpr const char* op = "quantize_packed_";
  const TensorView view(x.get());
  check(view.dim == 2, op, ": x has shape ", Integers{view.sizes, view.dim},
        ", expected two dimensions");
  check(view.sizes[0] <= INT32_MAX, op, ": x has ", view.sizes[0], " rows, expected at most ",
        INT32_MAX);
  check(format >= 0 && format <= int64_t(QuantFormat::nf4), op, ": format is ", format,
        ", expected 0, 1 or 2, which are int8, int4 and nf4");
  check(!offsets.has_value() || is_integer(QuantFormat(format)), op,
        ": offsets is a tensor, expected None, as nf4 is symmetric");
  QuantizePacked call = {};
  read_groups(op, {format, !offsets.has_value(), group_size, 1}, RowShape(op, {"x"}, view), call);
  storage_dtype(op, {"x"}, view);
  PackedResults results(op, view, call);
  results.read_codes(TensorView(codes.get()));
  results.read_scales(TensorView(scales.get()), offsets);
  results.read_errors(errors);
  RowReader reader(op);
  call.x = reader.read({"x"}, view);
  if (call.rows > 0) run(call, view.device_index);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("quantize_packed_", &boxed<&quantize_packed_>);
}

}  // namespace dsx
