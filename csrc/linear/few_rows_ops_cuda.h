// The torch side of skinny GEMMs on CUDA: memory that their kernels share.
#pragma once

#include <optional>

#include "linear/few_rows.h"
#include "common/torch/cuda.h"

namespace dsx {

// A call, and the memory of its `inverses`. Few rows have none: each block finds them faster than
// another kernel would begin.
template <class Call>
class WithInverses {
 public:
  Call call;

  WithInverses(const Call& given, int32_t device) : call(given) {
    if (!call.squares.is_present() || call.rows <= 8) return;
    memory_ = cuda_workspace(call.rows * int64_t(sizeof(float)), device);
    call.inverses = static_cast<float*>(memory_->data_ptr());
  }

 private:
  std::optional<torch::stable::Tensor> memory_;
};

}  // namespace dsx
