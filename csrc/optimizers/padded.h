// The elements at the end of a tensor that fill no whole line, or block of codes, in memory that
// does: the loops of a step load and store whole registers only.
#pragma once

#include <cstring>

#include "optimizers/step.h"

namespace dsx {

constexpr int64_t kStepLine = 16;  // elements, of which any range in memory is a multiple

template <class Rule>
class Padded {
 public:
  static constexpr int64_t unit_of(Format state) {
    return state == Format::codes ? kCodesBlock : kStepLine;
  }

  // Copies the elements of a tensor from `first` on, fewer than a unit, and zeros behind them.
  // Scales are read and written where they are.
  Padded(const StepTypes& types, const StepTensor<Rule::kStates>& whole, int64_t first)
      : tensor(whole), count_(whole.n - first), first_(first) {
    StepMemory<Rule::kStates>&source = tensor.source, &target = tensor.target;
    void* unwritten = nullptr;
    if (reads_grads(pass_of<Rule>())) copy(kGrad, tensor.grad, unwritten, bytes_of(types.grad));
    copy(kParam, source.param, target.param,
         source.master == nullptr ? bytes_of(types.weight) : bytes_of(types.param));
    copy(kMaster, source.master, target.master, bytes_of(types.weight));
    for (int j = 0; j < Rule::kStates; ++j) {
      copy(kFirstState + j, source.states[j], target.states[j], bytes_of(types.state));
      if (types.state == Format::codes && types.has_state(j)) {
        source.scales[j] += first / kCodesBlock;
        target.scales[j] += first / kCodesBlock;
      }
    }
  }

  // Copies what the rule has written to where it belongs.
  void store() const {
    constexpr Pass pass = pass_of<Rule>();
    if (writes_weights(pass)) {
      copy_back(kParam);
      copy_back(kMaster);
    }
    for (int j = 0; writes_states(pass) && j < Rule::kStates; ++j) copy_back(kFirstState + j);
  }

  StepTensor<Rule::kStates> tensor;  // in place, whatever the whole one is

 private:
  enum { kGrad, kParam, kMaster, kFirstState };
  static constexpr int kArrays = kFirstState + Rule::kStates;

  struct Array {
    char* origin;  // where it is copied back to; null: nowhere
    int64_t bytes;
    alignas(64) char padded[kCodesBlock * sizeof(float)];
  };

  void copy(int index, void*& source, void*& target, int64_t element_size) {
    Array& array = arrays_[index];
    array.origin = target == nullptr ? nullptr : static_cast<char*>(target) + first_ * element_size;
    if (source == nullptr) return;
    array.bytes = count_ * element_size;
    const int64_t end = (count_ + kStepLine - 1) / kStepLine * kStepLine * element_size;
    memcpy(array.padded, static_cast<const char*>(source) + first_ * element_size, array.bytes);
    memset(array.padded + array.bytes, 0, end - array.bytes);
    source = target = array.padded;
  }

  void copy_back(int index) const {
    const Array& array = arrays_[index];
    if (array.origin != nullptr) memcpy(array.origin, array.padded, array.bytes);
  }

  int64_t count_, first_;
  Array arrays_[kArrays];
};

}  // namespace dsx
