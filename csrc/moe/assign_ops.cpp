// The torch side of moe_assign, for the device that this is compiled for. The schema is in
// deepspeed_ext/ops/moe/assign.py.
#include <algorithm>
#include <optional>

#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "moe/assign.h"
#include "moe/moe_ops.h"
#include "moe/route.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

constexpr const char* kOp = "moe_assign";

#ifdef USE_CUDA
void run(Assign& call, int device) {
  const OnDevice on(device);
  const Tensor workspace =
      cuda_workspace(workspace_of_assign(call) * int64_t(sizeof(int32_t)), device);
  call.of_tiles = static_cast<int32_t*>(workspace.data_ptr());
  assign_cuda(call, on.stream);
}
#else
void run(const Assign& call, int /*device*/) { assign_cpu(call); }
#endif

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_assign(const Tensor& experts,
                                                      const OptionalTensor& seed,
                                                      int64_t num_experts,
                                                      std::optional<int64_t> capacity) {
  const TensorView view(experts.get());
  const WholeNumbers chosen(kOp, {"experts"}, experts, aoti_torch_dtype_int64(), view);
  const ChoiceShape shape(kOp, {"experts"}, view);
  check(num_experts >= 1 && num_experts <= kMostExperts, kOp, ": num_experts is ", num_experts,
        ", expected 1 to ", kMostExperts);
  check(capacity.value_or(0) >= 0, kOp, ": capacity is ", capacity.value_or(0),
        ", expected 0 or more, or None");
  std::optional<WholeNumbers> kept;
  if (seed.has_value()) {
    kept.emplace(kOp, Item{"seed"}, *seed, aoti_torch_dtype_int64(), view);
    check(kept->view.numel == 1, kOp, ": seed has shape ",
          Integers{kept->view.sizes, kept->view.dim}, ", expected one number");
  }
  const auto per_expert = [&](int32_t dtype) { return new_tensor(&num_experts, 1, dtype, view); };
  Tensor slots = new_tensor(view.sizes, view.dim, view.dtype, view);
  Tensor offsets = per_expert(aoti_torch_dtype_int32());
  Tensor counts = per_expert(view.dtype), first_counts = per_expert(view.dtype);
  Assign call = {};
  call.tokens = shape.rows;
  call.k = shape.length;
  call.num_experts = num_experts;
  call.capacity = std::min(capacity.value_or(view.numel), view.numel);
  call.experts = chosen.numbers<int64_t>();
  if (kept.has_value()) call.seed = kept->numbers<int64_t>();
  call.slots = static_cast<int64_t*>(slots.data_ptr());
  call.offsets = static_cast<int32_t*>(offsets.data_ptr());
  call.counts = static_cast<int64_t*>(counts.data_ptr());
  call.first_counts = static_cast<int64_t*>(first_counts.data_ptr());
  run(call, view.device_index);
  return {std::move(slots), std::move(offsets), std::move(counts), std::move(first_counts)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("moe_assign", &boxed<&moe_assign>);
}

}  // namespace dsx
