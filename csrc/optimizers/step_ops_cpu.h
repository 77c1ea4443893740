// Runs a step on the CPU, on torch's threads. For the *_ops.cpp of an optimizer.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "common/chunks.h"
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
    const std::vector<int64_t> tensor_begin = begin_step<Rule>(tensors);
    torch::stable::parallel_for(0, tensor_begin.back(), kElementsPerThread,
                                [&](int64_t begin, int64_t end) {
      step_cpu(isa, call, tensors.data(), tensor_begin.data(), int64_t(tensors.size()), begin, end);
    });
  }

  // Of a rule that measures: also writes the sums of squares of each tensor, 0 if it skips the
  // step.
  template <class Rule>
  static void measure(const StepCall<Rule>& call,
                      const std::vector<StepTensor<Rule::kStates>>& tensors, double* squares,
                      int /*device*/) {
    const Isa isa = current_isa();
    const int64_t count = int64_t(tensors.size());
    std::fill_n(squares, count * kMeasured, 0.0);
    if (call.found_inf.value() != 0) return;
    const std::vector<int64_t> tensor_begin = begin_step<Rule>(tensors);
    std::vector<int64_t> first_chunk{0};
    first_chunk.reserve(tensors.size() + 1);
    for (const auto& tensor : tensors) {
      const int64_t chunks = ceil_div(tensor.n, kReductionChunk);
      first_chunk.push_back(first_chunk.back() + chunks);
    }
    std::vector<double> of_chunks(size_t(first_chunk.back() * kMeasured));
    torch::stable::parallel_for(0, tensor_begin.back(), kReductionChunk,
                                [&](int64_t begin, int64_t end) {
      measure_cpu(isa, call, tensors.data(), tensor_begin.data(), first_chunk.data(), count, begin,
                  end, of_chunks.data());
    });
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t k = first_chunk[size_t(i)] * kMeasured;
           k < first_chunk[size_t(i) + 1] * kMeasured; ++k) {
        squares[i * kMeasured + k % kMeasured] += of_chunks[size_t(k)];
      }
    }
  }

 private:
  // Advances the steps, and returns where each tensor begins in their row, then the end.
  template <class Rule>
  static std::vector<int64_t> begin_step(const std::vector<StepTensor<Rule::kStates>>& tensors) {
    std::vector<int64_t> tensor_begin{0};
    tensor_begin.reserve(tensors.size() + 1);
    for (const auto& tensor : tensors) {
      if (advances_steps(pass_of<Rule>())) *tensor.step += 1;
      tensor_begin.push_back(tensor_begin.back() + tensor.n);
    }
    return tensor_begin;
  }
};

}  // namespace dsx
