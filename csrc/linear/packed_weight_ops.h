// Reads the tensors of a packed weight, with codes of DSX_BITS.
#pragma once

#include "common/torch/rows.h"
#include "quantization/packed_weight.h"

namespace dsx {

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

  // `item` is what an error calls them.
  void read_offsets(const Item& item, const OptionalTensor& offsets) {
    if (!offsets.has_value()) return;
    check(weight.format != QuantFormat::nf4, op_, ": ", item,
          " is a tensor, expected None, as nf4 is symmetric");
    weight.offsets = read_floats(item, TensorView(offsets->get()));
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
  const torch::stable::Tensor &codes, &scales;
  const OptionalTensor& offsets;
  int64_t format, group_size;
};

}  // namespace dsx
