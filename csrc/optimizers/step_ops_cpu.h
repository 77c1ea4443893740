// Runs a step on the CPU, on torch's threads. For step_ops.cpp.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "optimizers/chunks.h"
#include "optimizers/shared_for_ops.h"
#include "optimizers/skipped.h"
#include "optimizers/step.h"

namespace dsx {

constexpr int64_t kElementsPerThread = 32768;  // about 25 us of work: less is not worth a thread

struct Cpu {
  template <class Rule>
  static void run(const StepCall<Rule>& call, const std::vector<StepTensor<Rule::kStates>>& tensors,
                  int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    if (call.found_inf.value() != 0) return copy_all(copies_if_skipped(call, tensors));
    advance(call, tensors);
    const std::vector<int64_t> tensor_begin = begins_of_tensors(tensors);
    shared_for(tensor_begin.back(), kElementsPerThread, [&](int64_t begin, int64_t end) {
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
    if (call.found_inf.value() != 0) {
      std::fill_n(squares, count * kMeasured, 0.0);
      return copy_all(copies_if_skipped(call, tensors));
    }
    advance(call, tensors);
    const std::vector<int64_t> tensor_begin = begins_of_tensors(tensors);
    const std::vector<int64_t> first_chunk = begins_of(
        tensors.size(), [&](size_t i) { return ceil_div(tensors[i].n, kReductionChunk); });
    std::vector<double> of_chunks(size_t(first_chunk.back() * kMeasured));
    torch::stable::parallel_for(0, tensor_begin.back(), kReductionChunk,
                                [&](int64_t begin, int64_t end) {
      measure_cpu(isa, call, tensors.data(), tensor_begin.data(), first_chunk.data(), count, begin,
                  end, of_chunks.data());
    });
    add_chunks(of_chunks.data(), first_chunk, kMeasured, squares);
  }

 private:
  template <class Rule>
  static void advance(const StepCall<Rule>& /*call*/,
                      const std::vector<StepTensor<Rule::kStates>>& tensors) {
    if (!advances_step_counts(pass_of<Rule>())) return;
    for (const auto& tensor : tensors) {
      *tensor.target.step_count = *tensor.source.step_count + 1;
    }
  }

  template <class Tensor>
  static std::vector<int64_t> begins_of_tensors(const std::vector<Tensor>& tensors) {
    return begins_of(tensors.size(), [&](size_t i) { return tensors[i].n; });
  }
};

}  // namespace dsx
