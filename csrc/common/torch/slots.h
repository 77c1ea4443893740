// Whole numbers as tensors, and those among them that say where the copies of tokens are among the
// rows of experts.
#pragma once

#include <vector>

#include "common/torch/new_tensor.h"

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

// Which choice each row before `end` is, of `count` choices, each of which has a place or -1: each
// row is the place of one of them. Throws std::invalid_argument if it is not.
inline std::vector<int64_t> choices_of_rows(const char* op, const int64_t* slots, int64_t count,
                                            int64_t end) {
  std::vector<int64_t> choices(static_cast<size_t>(end), -1);
  int64_t taken = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = slots[i];
    if (place == -1) continue;
    check(place >= 0 && place < end, op, ": slots has ", place, " as its element number ", i,
          ", expected a row before ", end, ", the last of the offsets, or -1");
    check(choices[size_t(place)] == -1, op, ": slots has ", place, " as its element number ", i,
          ", expected a row that no other element is");
    choices[size_t(place)] = i;
    ++taken;
  }
  check(taken == end, op, ": slots has ", taken, " rows, expected ", end,
        ", the last of the offsets");
  return choices;
}

}  // namespace dsx
