// The torch side of token_sort_, for the device that this is compiled for. The schema is in
// deepspeed_ext/ops/random_ltd/token_sort.py.
#include "common/torch/arguments.h"
#include "random_ltd/ids_ops.h"
#include "random_ltd/token_sort.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

#ifdef USE_CUDA
void run(TokenSort& call, int device) {
  const OnDevice on(device);
  std::optional<Tensor> workspace;
  if (call.tokens >= kSortedTogether) {
    workspace = cuda_workspace(call.rows * call.kept * int64_t(sizeof(int32_t)), device);
    call.before = static_cast<int32_t*>(workspace->data_ptr());
  }
  token_sort_cuda(call, on.stream);
}
#else
constexpr int64_t kIdsPerThread = 1024;  // some 10 us: less is not worth a thread

void run(const TokenSort& call, int /*device*/) {
  in_parallel(call.rows, call.kept, kIdsPerThread,
              [&](Isa, int64_t begin, int64_t end) { token_sort_cpu(call, begin, end); });
}
#endif

void token_sort_(const Tensor& ids, int64_t original_tokens) {
  constexpr const char* op = "token_sort_";
  const TensorView view(ids.get());
  const WholeNumbers numbers(op, {"ids"}, ids, aoti_torch_dtype_int32(), view);
  check(view.dim > 0, op, ": ids has shape [], expected a dimension at least");
  check(view.is_contiguous(), op, ": ids has strides ", Integers{view.strides, view.dim},
        ", expected to be contiguous");
  checked_tokens(op, {"original_tokens"}, original_tokens);
  const int64_t kept = checked_tokens(op, {"the last dimension of ids"}, view.sizes[view.dim - 1]);
  check_ids(op, numbers.numbers<int32_t>(), view.numel, original_tokens);
  if (view.numel == 0) return;
  TokenSort call = {view.numel / kept, kept, original_tokens, reinterpret_cast<int32_t*>(view.data),
                    nullptr};
  run(call, view.device_index);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("token_sort_", &boxed<&token_sort_>);
}

}  // namespace dsx
