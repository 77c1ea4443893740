// The torch side of rows for choices: checks, and what is written.
#pragma once

#include <algorithm>
#include <optional>

#include "common/torch/arguments.h"
#include "moe/assign.h"
#include "moe/moe_ops.h"

namespace dsx {

// A call of moe_assign as part of an op of this name, all but which experts are chosen.
class AssignReader {
  using Tensor = torch::stable::Tensor;

 public:
  Assign call = {};
  Tensor slots, offsets, counts, first_counts;

  // `view` is what choices are like: their shape and device.
  AssignReader(const char* op, const TensorView& view, const ChoiceShape& shape,
               int64_t num_experts, std::optional<int64_t> capacity, const OptionalTensor& seed)
      : slots(new_tensor(view.sizes, view.dim, aoti_torch_dtype_int64(), view)),
        offsets(new_tensor(&num_experts, 1, aoti_torch_dtype_int32(), view)),
        counts(new_tensor(&num_experts, 1, aoti_torch_dtype_int64(), view)),
        first_counts(new_tensor(&num_experts, 1, aoti_torch_dtype_int64(), view)) {
    check(capacity.value_or(0) >= 0, op, ": capacity is ", capacity.value_or(0),
          ", expected 0 or more, or None");
    if (seed.has_value()) {
      seed_.emplace(op, Item{"seed"}, *seed, aoti_torch_dtype_int64(), view);
      check(seed_->view.numel == 1, op, ": seed has shape ",
            Integers{seed_->view.sizes, seed_->view.dim}, ", expected one number");
      call.seed = seed_->numbers<int64_t>();
    }
    call.tokens = shape.rows;
    call.k = shape.length;
    call.num_experts = num_experts;
    call.capacity = std::min(capacity.value_or(view.numel), view.numel);
    call.slots = static_cast<int64_t*>(slots.data_ptr());
    call.offsets = static_cast<int32_t*>(offsets.data_ptr());
    call.counts = static_cast<int64_t*>(counts.data_ptr());
    call.first_counts = static_cast<int64_t*>(first_counts.data_ptr());
  }

#ifdef USE_CUDA
  // Gives the call its workspace, which is kept as long as this is.
  void make_workspace(int device) {
    workspace_ = cuda_workspace(workspace_of_assign(call) * int64_t(sizeof(int32_t)), device);
    call.of_tiles = static_cast<int32_t*>(workspace_->data_ptr());
  }
#endif

 private:
  std::optional<WholeNumbers> seed_;
  std::optional<Tensor> workspace_;
};

}  // namespace dsx
