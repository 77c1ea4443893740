// The torch side of moe_assign, for the device that this is compiled for. The schema is in
// deepspeed_ext/ops/moe/assign.py.
#include "common/torch/device.h"
#include "moe/assign_ops.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

constexpr const char* kOp = "moe_assign";

#ifdef USE_CUDA
void run(AssignReader& made, int device) {
  const OnDevice on(device);
  made.make_workspace(device);
  assign_cuda(made.call, on.stream);
}
#else
void run(const AssignReader& made, int /*device*/) { assign_cpu(made.call); }
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
  AssignReader made(kOp, view, shape, num_experts, capacity, seed);
  made.call.experts = chosen.numbers<int64_t>();
  run(made, view.device_index);
  return {std::move(made.slots), std::move(made.offsets), std::move(made.counts),
          std::move(made.first_counts)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("moe_assign", &boxed<&moe_assign>);
}

}  // namespace dsx
