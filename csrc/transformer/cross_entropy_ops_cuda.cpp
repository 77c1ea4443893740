// Registers the CUDA kernels of cross_entropy; the schemas are in
// deepspeed_ext/ops/transformer/cross_entropy.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "transformer/cross_entropy_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const CrossEntropy& call, Reduction reduction, float* divisor, float* loss,
                  int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = current_cuda_stream(device);
    count_targets_cuda(call, reduction, divisor, stream);
    cross_entropy_cuda(call, stream);
    if (loss != nullptr) add_losses_cuda(call, loss, stream);
  }

  static void run_backward(const CrossEntropy& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    cross_entropy_backward_cuda(call, current_cuda_stream(device));
  }

  static void scale(Rows rows, int64_t count, int64_t length, const float* factors, int64_t pitch,
                    int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    scale_rows_cuda(rows, count, length, factors, pitch, current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("cross_entropy", &boxed<&cross_entropy<Cuda>>);
  library.impl("cross_entropy_", &boxed<&cross_entropy_in_place<Cuda>>);
  library.impl("cross_entropy_backward", &boxed<&cross_entropy_backward<Cuda>>);
  library.impl("cross_entropy_scale_", &boxed<&cross_entropy_scale<Cuda>>);
}

}  // namespace dsx
