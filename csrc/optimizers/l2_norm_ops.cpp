// The torch side of squared_norms, for the device that this is compiled for. The schema is in
// deepspeed_ext/ops/optimizers/l2_norm.py.
#include "optimizers/chunks.h"
#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "optimizers/dense_elements_ops.h"
#include "optimizers/l2_norm.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

#ifdef USE_CUDA
void run(const std::vector<NormTensor>& tensors, double* squared_norms, int device) {
  const OnDevice on(device);
  const int64_t count = int64_t(tensors.size());
  const int64_t doubles = squared_norms_workspace(tensors.data(), count);
  const Tensor workspace = cuda_workspace(doubles * int64_t(sizeof(double)), device);
  squared_norms_cuda(tensors.data(), count, static_cast<double*>(workspace.data_ptr()),
                     squared_norms, on.stream);
}
#else
constexpr int64_t kElementsPerThread = 2 * kReductionChunk;  // 10 us: less is not worth a thread

void run(const std::vector<NormTensor>& tensors, double* squared_norms, int /*device*/) {
  const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
  const std::vector<int64_t> tensor_begin =
      begins_of(tensors.size(), [&](size_t i) { return tensors[i].n; });
  const std::vector<int64_t> first_chunk =
      begins_of(tensors.size(), [&](size_t i) { return ceil_div(tensors[i].n, kReductionChunk); });
  std::vector<double> squares(size_t(first_chunk.back()));
  torch::stable::parallel_for(0, tensor_begin.back(), kElementsPerThread,
                              [&](int64_t begin, int64_t end) {
    squares_of_chunks_cpu(isa, tensors.data(), tensor_begin.data(), first_chunk.data(),
                          int64_t(tensors.size()), begin, end, squares.data());
  });
  add_chunks(squares.data(), first_chunk, 1, squared_norms);
}
#endif

// The op itself. run(tensors, squared_norms, device_index) works them out or queues that;
// l2_norm_ops.cpp and l2_norm_ops_cuda.cpp have one each.
torch::stable::Tensor squared_norms(const TensorList& tensors) {
  constexpr const char* op = "squared_norms";
  const int64_t count = int64_t(tensors.size());
  const std::vector<char*> addresses = tensors.addresses();
  const TensorView first(tensors[0], addresses[0]);
  std::vector<NormTensor> norm_tensors(tensors.size());
  std::vector<torch::stable::Tensor> copies;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorView view(tensors[i], addresses[i]);
    const Item item{"tensors", i};
    check_device(op, item, view, first);
    const Dtype dtype = storage_dtype(op, item, view);
    check_memory(op, item, view);
    norm_tensors[i] = {dense_elements(view, copies), view.numel, dtype};
  }
  torch::stable::Tensor squares = new_tensor(&count, 1, aoti_torch_dtype_float64(), first);
  run(norm_tensors, static_cast<double*>(squares.data_ptr()), first.device_index);
  return squares;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("squared_norms", &boxed<&squared_norms>);
}

}  // namespace dsx
