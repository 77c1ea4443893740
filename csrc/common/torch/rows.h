// Reads tensors as rows along their last dimension, for the ops that work along it.
#pragma once

#include "common/rows.h"
#include "common/torch/new_tensor.h"

namespace dsx {

using OptionalTensor = std::optional<torch::stable::Tensor>;

// How many rows, and how long they are. The tensor has a dimension at least.
struct RowShape {
  int64_t rows, length;

  RowShape(const char* op, const Item& item, const TensorView& view) {
    check(view.dim > 0, op, ": ", item, " has shape [], expected a dimension at least");
    length = view.sizes[view.dim - 1];
    rows = 1;
    for (int64_t i = 0; i < view.dim - 1; ++i) rows *= view.sizes[i];
  }
};

// Turns the arguments of one call into Rows. A tensor whose rows do not lie in one piece each, at
// the same distance from one another, all of them or those of groups that do, is copied first; this
// object keeps the copies.
class RowReader {
 public:
  explicit RowReader(const char* op) : op_(op) {}

  Rows read(const Item& item, const TensorView& view) {
    const Dtype dtype = storage_dtype(op_, item, view);
    check_memory(op_, item, view);
    Rows rows{view.data, view.sizes[view.dim - 1], dtype};
    if (lie_as_rows(view, rows)) return rows;
    copies_.push_back(contiguous_copy(view));
    return {copies_.back().data_ptr(), view.sizes[view.dim - 1], dtype};
  }

  // The same for one that must have the device and the shape of `like`; absent if there is none.
  Rows read(const Item& item, const OptionalTensor& tensor, const TensorView& like) {
    if (!tensor.has_value()) return {};
    const TensorView view(tensor->get());
    check_device(op_, item, view, like);
    check_shape(op_, item, view, like);
    return read(item, view);
  }

  // One row for all, of this length.
  Rows read_vector(const Item& item, const OptionalTensor& tensor, int64_t length,
                   const TensorView& like) {
    if (!tensor.has_value()) return {};
    const TensorView view(tensor->get());
    check_device(op_, item, view, like);
    check(view.dim == 1 && view.sizes[0] == length, op_, ": ", item, " has shape ",
          Integers{view.sizes, view.dim}, ", expected [", length, "]");
    Rows rows = read(item, view);
    rows.pitch = 0;
    return rows;
  }

 private:
  // Finds the distances of neighbouring rows, and of groups of them, if they have such.
  static bool lie_as_rows(const TensorView& view, Rows& rows) {
    const int64_t last = view.dim - 1;
    if (view.numel == 0) return true;
    if (view.sizes[last] > 1 && view.strides[last] != 1) return false;
    int64_t count = 1;   // of the dimensions looked at so far
    int64_t groups = 1;  // among them; each has rows.group rows if there is more than one
    for (int64_t i = last - 1; i >= 0; --i) {
      const int64_t size = view.sizes[i], stride = view.strides[i];
      if (size == 1) continue;
      if (count == 1) rows.pitch = stride;
      if (rows.group == 0 && stride != count * rows.pitch) {
        rows.group = count;
        rows.group_pitch = stride;
      }
      if (rows.group > 0) {
        if (stride != groups * rows.group_pitch) return false;
        groups *= size;
      }
      count *= size;
    }
    return true;
  }

  const char* op_;
  std::vector<torch::stable::Tensor> copies_;
};

// A new tensor with the sizes of `view`, and the same as rows.
struct NewRows {
  torch::stable::Tensor tensor;
  Rows rows;

  NewRows(const TensorView& view, Dtype dtype)
      : tensor(new_tensor(view, dtype)), rows{tensor.data_ptr(), view.sizes[view.dim - 1], dtype} {}
};

}  // namespace dsx
