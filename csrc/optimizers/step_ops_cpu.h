// Runs a step on the CPU, on torch's threads. For the *_ops.cpp of an optimizer.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "common/simd/isa.h"
#include "optimizers/step.h"

namespace dsx {

constexpr int64_t kElementsPerThread = 32768;  // about 25 us of work: less is not worth a thread

struct Cpu {
  template <class Rule>
  static void run(const StepCall<Rule>& call, const std::vector<StepTensor<Rule::kStates>>& tensors,
                  int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    if (call.found_inf.value() != 0) return;
    std::vector<int64_t> tensor_begin{0};
    tensor_begin.reserve(tensors.size() + 1);
    for (const auto& tensor : tensors) {
      *tensor.step += 1;
      tensor_begin.push_back(tensor_begin.back() + tensor.n);
    }
    torch::stable::parallel_for(0, tensor_begin.back(), kElementsPerThread,
                                [&](int64_t begin, int64_t end) {
      step_cpu(isa, call, tensors.data(), tensor_begin.data(), int64_t(tensors.size()), begin, end);
    });
  }
};

}  // namespace dsx
