// Queues a step on the current stream of a CUDA device. For step_ops.cpp.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <vector>

#include "common/torch/cuda.h"
#include "optimizers/skipped.h"
#include "optimizers/step.h"

namespace dsx {

struct Cuda {
  template <class Rule>
  static void run(const StepCall<Rule>& call, const std::vector<StepTensor<Rule::kStates>>& tensors,
                  int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const int64_t count = int64_t(tensors.size());
    const torch::stable::Tensor constants =
        cuda_workspace(count * int64_t(sizeof(TensorConstants<Rule>)), device);
    void* stream = current_cuda_stream(device);
    step_cuda(call, tensors.data(), count,
              static_cast<TensorConstants<Rule>*>(constants.data_ptr()), stream);
    copy_if_skipped_cuda(call.found_inf, copies_if_skipped(call, tensors), Rule::kOp, stream);
  }

  // Of a rule that measures: also queues the sums of squares of each tensor, 0 if it skips the
  // step.
  template <class Rule>
  static void measure(const StepCall<Rule>& call,
                      const std::vector<StepTensor<Rule::kStates>>& tensors, double* squares,
                      int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const int64_t count = int64_t(tensors.size());
    const torch::stable::Tensor constants =
        cuda_workspace(count * int64_t(sizeof(TensorConstants<Rule>)), device);
    const int64_t doubles = measure_cuda_workspace<Rule>(tensors.data(), count);
    const torch::stable::Tensor workspace =
        cuda_workspace(doubles * int64_t(sizeof(double)), device);
    void* stream = current_cuda_stream(device);
    measure_cuda(call, tensors.data(), count,
                 static_cast<TensorConstants<Rule>*>(constants.data_ptr()),
                 static_cast<double*>(workspace.data_ptr()), squares, stream);
    copy_if_skipped_cuda(call.found_inf, copies_if_skipped(call, tensors), Rule::kOp, stream);
  }
};

}  // namespace dsx
