// The memory of a tensor whose elements are wanted in any order.
#pragma once

#include "common/torch/new_tensor.h"

namespace dsx {

// The elements of a tensor as they lie in memory. If they do not fill their memory once (expanded
// gradients, slices), those of a contiguous copy, which `copies` keeps.
inline const void* dense_elements(const TensorView& view,
                                  std::vector<torch::stable::Tensor>& copies) {
  if (view.is_dense()) return view.data;
  copies.push_back(contiguous_copy(view));
  return copies.back().data_ptr();
}

}  // namespace dsx
