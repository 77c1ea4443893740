// What the ops of this room ask of their arguments.
#pragma once

#include "common/torch/rows.h"

namespace dsx {

// Whole numbers of torch's code, contiguous: a copy of them, or the tensor itself, which is kept as
// long as this is.
class WholeNumbers {
 public:
  WholeNumbers(const char* op, const Item& item, const torch::stable::Tensor& tensor, int32_t dtype,
               const TensorView& beside)
      : view(tensor.get()), kept_(tensor) {
    check_device(op, item, view, beside);
    check(view.dtype == dtype, op, ": ", item, " is ", DtypeCode{view.dtype}, ", expected ",
          DtypeCode{dtype});
    check_memory(op, item, view);
    if (!view.is_contiguous()) kept_ = contiguous_copy(view);
  }

  template <class Integer>
  const Integer* numbers() const {
    return static_cast<const Integer*>(kept_.data_ptr());
  }

  const TensorView view;

 private:
  torch::stable::Tensor kept_;
};

// The choices of tokens: a tensor whose last dimension is k, the others are tokens.
struct ChoiceShape : RowShape {
  ChoiceShape(const char* op, const Item& item, const TensorView& view) : RowShape(op, item, view) {
    constexpr int64_t kMost = INT32_MAX;
    check(view.numel <= kMost, op, ": ", item, " has ", view.numel, " elements, expected ", kMost,
          " at the most");
  }
};

// A tensor of float32, bfloat16 or float16 with the shape of another one, as rows of one element.
inline Rows read_numbers(const char* op, const Item& item, const TensorView& view,
                         const TensorView& shape, torch::stable::Tensor& kept) {
  check_device(op, item, view, shape);
  check_shape(op, item, view, shape);
  const Dtype dtype = storage_dtype(op, item, view);
  check_memory(op, item, view);
  if (!view.is_contiguous()) kept = contiguous_copy(view);
  return {kept.data_ptr(), 1, dtype};
}

}  // namespace dsx
