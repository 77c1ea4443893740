// The torch side of quantize, dequantize and fake_quantize, for the device that this is compiled
// for. The schemas are in deepspeed_ext/ops/quantization/.
#include <algorithm>
#include <optional>
#include <vector>

#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "common/torch/rows.h"
#include "quantization/groups_ops.h"
#include "quantization/quantize.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

int32_t torch_code(QuantFormat format, bool symmetric) {
  switch (format) {
    case QuantFormat::fp8_e4m3: return aoti_torch_dtype_float8_e4m3fn();
    case QuantFormat::fp8_e5m2: return aoti_torch_dtype_float8_e5m2();
    case QuantFormat::int8: return symmetric ? aoti_torch_dtype_int8() : aoti_torch_dtype_uint8();
    case QuantFormat::int4:
    case QuantFormat::nf4: return aoti_torch_dtype_uint8();
  }
  return -1;
}

// The shape of scales: that of x with groups in the place of elements or, unless groups of one row
// were asked for, a matrix.
std::vector<int64_t> shape_of_scales(const Groups& call, const OptionalInt& group_rows,
                                     const TensorView& rows) {
  if (group_rows.value_or(0) != 1) return {call.bands(), call.columns()};
  std::vector<int64_t> sizes(rows.sizes, rows.sizes + rows.dim);
  sizes.back() = call.columns();
  return sizes;
}

Noise noise_of(const char* op, const Groups& call, const OptionalInt& seed) {
  check(!seed.has_value() || is_integer(call.format), op, ": seed is ", seed.value_or(0),
        ", expected None, as only int8 and int4 are rounded stochastically");
  return make_noise({uint64_t(seed.value_or(0)), 0, seed.has_value()}, 0);
}

// What a call makes beside codes or floats; of no elements if it is not wanted.
struct NewScales {
  Tensor scales, offsets;

  NewScales(Quantize& call, const OptionalInt& group_rows, const TensorView& x, bool wanted)
      : scales(make(wanted ? shape_of_scales(call, group_rows, x) : kNone, x)),
        offsets(make(wanted && call.asymmetric ? shape_of_scales(call, group_rows, x) : kNone, x)) {
    call.scales = wanted ? static_cast<float*>(scales.data_ptr()) : nullptr;
    call.offsets = wanted && call.asymmetric ? static_cast<float*>(offsets.data_ptr()) : nullptr;
  }

 private:
  static inline const std::vector<int64_t> kNone{0};

  static Tensor make(const std::vector<int64_t>& sizes, const TensorView& beside) {
    return new_tensor(sizes.data(), int64_t(sizes.size()), torch_code(Dtype::float32), beside);
  }
};

#ifdef USE_CUDA
bool measures_before(const Quantize& call) { return quantize_cuda_measures_before(call); }

void run(const Quantize& call, int device) { quantize_cuda(call, OnDevice(device).stream); }
void run(const Dequantize& call, int device) { dequantize_cuda(call, OnDevice(device).stream); }
#else
constexpr int64_t kElementsPerThread = 32768;  // some 10 us: less is not worth a thread

bool measures_before(const Quantize& call) {
  return call.group_rows != 1 || call.group > kMostAtOnce;
}

void measure(const Quantize& call) {
  const Parts parts(call);
  std::vector<Largest> found(size_t(call.bands() * call.columns() * parts.of_group));
  in_parallel(int64_t(found.size()), parts.rows * parts.columns, kElementsPerThread,
              [&](Isa isa, int64_t begin, int64_t end) {
    measure_parts_cpu(isa, call, begin, end, found.data());
  });
  finish_scales_cpu(current_isa(), call, found.data());
}

void run(const Quantize& call, int /*device*/) {
  const bool measured = measures_before(call);
  if (measured) measure(call);
  const QuantizeTasks tasks(call, measured);
  in_parallel(
      tasks.count(call), std::min(tasks.length, call.length), kElementsPerThread,
      [&](Isa isa, int64_t begin, int64_t end) { quantize_cpu(isa, call, measured, begin, end); });
}

void run(const Dequantize& call, int /*device*/) {
  const QuantizeTasks tasks(call, true);
  in_parallel(tasks.count(call), std::min(tasks.length, call.length), kElementsPerThread,
              [&](Isa isa, int64_t begin, int64_t end) { dequantize_cpu(isa, call, begin, end); });
}
#endif

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, int64_t format, bool symmetric,
                                            OptionalInt group_size, OptionalInt group_rows,
                                            OptionalInt seed) {
  constexpr const char* op = "quantize";
  const TensorView view(x.get());
  Quantize call = {};
  read_groups(op, {format, symmetric, group_size, group_rows}, RowShape(op, {"x"}, view), call);
  call.noise = noise_of(op, call, seed);
  RowReader reader(op);
  call.x = reader.read({"x"}, view);
  NewScales made(call, group_rows, view, true);
  std::vector<int64_t> sizes(view.sizes, view.sizes + view.dim);
  sizes.back() = bytes_of_row(call.format, call.length);
  Tensor codes = new_tensor(sizes.data(), view.dim, torch_code(call.format, symmetric), view);
  call.codes = static_cast<uint8_t*>(codes.data_ptr());
  if (view.numel > 0) run(call, view.device_index);
  return {std::move(codes), std::move(made.scales), std::move(made.offsets)};
}

// What the codes of x stand for, in a new tensor or where x is.
Tensor fake_quantize(const Tensor& x, int64_t format, bool symmetric, OptionalInt group_size,
                     OptionalInt group_rows, OptionalInt seed) {
  constexpr const char* op = "fake_quantize";
  const TensorView view(x.get());
  Quantize call = {};
  read_groups(op, {format, symmetric, group_size, group_rows}, RowShape(op, {"x"}, view), call);
  call.noise = noise_of(op, call, seed);
  RowReader reader(op);
  call.x = reader.read({"x"}, view);
  NewRows out(view, call.x.dtype);
  call.out = out.rows;
  const NewScales made(call, group_rows, view, measures_before(call));
  if (view.numel > 0) run(call, view.device_index);
  return std::move(out.tensor);
}

void fake_quantize_(const Tensor& x, int64_t format, bool symmetric, OptionalInt group_size,
                    OptionalInt group_rows, OptionalInt seed) {
  constexpr const char* op = "fake_quantize_";
  const TensorView view(x.get());
  Quantize call = {};
  read_groups(op, {format, symmetric, group_size, group_rows}, RowShape(op, {"x"}, view), call);
  call.noise = noise_of(op, call, seed);
  check(view.is_contiguous(), op, ": x has strides ", Integers{view.strides, view.dim},
        " for shape ", Integers{view.sizes, view.dim}, ", expected a contiguous tensor");
  RowReader reader(op);
  call.x = reader.read({"x"}, view);
  call.out = call.x;
  const NewScales made(call, group_rows, view, measures_before(call));
  if (view.numel > 0) run(call, view.device_index);
}

// An argument as contiguous memory: itself, or a copy.
class Contiguous {
 public:
  explicit Contiguous(const TensorView& view) : data_(view.data) {
    if (view.is_contiguous()) return;
    copy_ = contiguous_copy(view);
    data_ = static_cast<char*>(copy_->data_ptr());
  }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::optional<Tensor> copy_;
  char* data_;
};

void check_numbers(const char* op, const Item& item, const TensorView& got,
                   const std::vector<int64_t>& sizes, const TensorView& codes) {
  check_device(op, item, got, codes);
  check_dtype(op, item, got, Dtype::float32);
  const Integers want{sizes.data(), int64_t(sizes.size())};
  check(got.dim == want.count && std::equal(sizes.begin(), sizes.end(), got.sizes), op, ": ", item,
        " has shape ", Integers{got.sizes, got.dim}, ", expected ", want);
  check_memory(op, item, got);
}

Tensor dequantize(const Tensor& codes, const Tensor& scales, const OptionalTensor& offsets,
                  int64_t format, OptionalInt group_size, OptionalInt group_rows, int64_t length,
                  int64_t dtype) {
  constexpr const char* op = "dequantize";
  const TensorView view(codes.get());
  RowShape shape(op, {"codes"}, view);
  const int64_t bytes = shape.length;
  shape.length = length;
  check(length >= 0, op, ": length is ", length, ", expected at least 0");
  Dequantize call = {};
  read_groups(op, {format, !offsets.has_value(), group_size, group_rows}, shape, call);
  const int32_t want = torch_code(call.format, !offsets.has_value());
  check(view.dtype == want, op, ": codes is ", DtypeCode{view.dtype}, ", expected ",
        DtypeCode{want});
  check(bytes == bytes_of_row(call.format, length), op, ": codes has shape ",
        Integers{view.sizes, view.dim}, ", expected ", bytes_of_row(call.format, length),
        " in the last dimension for length ", length);
  check_memory(op, {"codes"}, view);
  const TensorView scales_view(scales.get());
  const std::vector<int64_t> sizes = shape_of_scales(call, group_rows, view);
  check_numbers(op, {"scales"}, scales_view, sizes, view);
  if (offsets.has_value()) {
    check_numbers(op, {"offsets"}, TensorView(offsets->get()), sizes, view);
  }
  const Contiguous codes_here(view), scales_here(scales_view);
  const Contiguous offsets_here(offsets.has_value() ? TensorView(offsets->get()) : scales_view);
  call.codes = codes_here.as<uint8_t>();
  call.scales = scales_here.as<float>();
  call.offsets = offsets.has_value() ? offsets_here.as<float>() : nullptr;
  std::vector<int64_t> out_sizes(view.sizes, view.sizes + view.dim);
  out_sizes.back() = length;
  TensorView out_view = view;  // what the result is like
  out_view.sizes = out_sizes.data();
  out_view.numel = shape.rows * length;
  check(dtype >= 0 && dtype <= int64_t(Dtype::float16), op, ": dtype is number ", dtype,
        ", expected a number from 0 to ", int64_t(Dtype::float16));
  NewRows out(out_view, Dtype(dtype));
  call.out = out.rows;
  if (out_view.numel > 0) run(call, view.device_index);
  return std::move(out.tensor);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("quantize", &boxed<&quantize>);
  library.impl("dequantize", &boxed<&dequantize>);
  library.impl("fake_quantize", &boxed<&fake_quantize>);
  library.impl("fake_quantize_", &boxed<&fake_quantize_>);
}

}  // namespace dsx
