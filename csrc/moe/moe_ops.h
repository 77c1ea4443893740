// What the ops of this room ask of their arguments.
#pragma once

#include "common/torch/rows.h"
#include "common/torch/slots.h"

namespace dsx {

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
