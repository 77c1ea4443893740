// Queues a step on the current stream of a CUDA device. For the *_ops_cuda.cpp of an optimizer.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <vector>

#include "common/torch/cuda.h"
#include "optimizers/step.h"

namespace dsx {

struct Cuda {
  template <class Rule>
  static void run(const StepCall<Rule>& call, const std::vector<StepTensor<Rule::kStates>>& tensors,
                  int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const torch::stable::Tensor prepared =
        cuda_workspace(int64_t(tensors.size() * sizeof(Prepared<Rule>)), device);
    step_cuda(call, tensors.data(), int64_t(tensors.size()),
              static_cast<Prepared<Rule>*>(prepared.data_ptr()), current_cuda_stream(device));
  }

  // Of a rule that measures: also queues the sums of squares of each tensor, 0 if it skips the
  // step.
  template <class Rule>
  static void measure(const StepCall<Rule>& call,
                      const std::vector<StepTensor<Rule::kStates>>& tensors, double* squares,
                      int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const int64_t count = int64_t(tensors.size());
    const torch::stable::Tensor prepared =
        cuda_workspace(count * int64_t(sizeof(Prepared<Rule>)), device);
    const int64_t doubles = doubles_to_measure(tensors.data(), count);
    const torch::stable::Tensor workspace =
        cuda_workspace(doubles * int64_t(sizeof(double)), device);
    measure_cuda(call, tensors.data(), count, static_cast<Prepared<Rule>*>(prepared.data_ptr()),
                 static_cast<double*>(workspace.data_ptr()), squares, current_cuda_stream(device));
  }
};

}  // namespace dsx
