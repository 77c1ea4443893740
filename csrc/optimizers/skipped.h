// A step that is skipped and not in place: what is written is what was read.
#pragma once

#include <cstring>
#include <vector>

#include "common/math.h"
#include "optimizers/step.h"

namespace dsx {

struct MemoryCopy {
  const void* source;
  void* target;
  int64_t bytes;
};

template <class Rule>
std::vector<MemoryCopy> copies_if_skipped(const StepCall<Rule>& call,
                                          const std::vector<StepTensor<Rule::kStates>>& tensors) {
  std::vector<MemoryCopy> copies;
  const auto add = [&](const void* source, void* target, int64_t bytes) {
    if (source != target && bytes > 0) copies.push_back({source, target, bytes});
  };
  if (call.in_place) return copies;
  const Format master = call.types.weight == Format::split ? Format::split : Format::float32;
  for (const auto& [source, target, grad, noise, n] : tensors) {
    add(source.param, target.param, n * bytes_of(call.types.param));
    add(source.master, target.master, n * bytes_of(master));
    for (int j = 0; j < Rule::kStates; ++j) {
      add(source.states[j], target.states[j], n * bytes_of(call.types.state));
      add(source.scales[j], target.scales[j], ceil_div(n, kCodesBlock) * int64_t(sizeof(float)));
    }
    add(source.step_count, target.step_count, sizeof(float));
  }
  return copies;
}

// Queues them on the stream, for the case that found_inf says skip. Throws if a launch fails.
void copy_if_skipped_cuda(const Scalar& found_inf, const std::vector<MemoryCopy>& copies,
                          const char* op, void* stream);

inline void copy_all(const std::vector<MemoryCopy>& copies) {
  for (const auto& [source, target, bytes] : copies) memcpy(target, source, size_t(bytes));
}

}  // namespace dsx
