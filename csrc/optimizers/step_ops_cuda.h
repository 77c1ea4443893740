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
};

}  // namespace dsx
