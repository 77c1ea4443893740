// Results of a step that go to other memory than they came from, past the cache: an ordinary store
// reads the line that it writes to first, a third more of all that such a step moves.
#pragma once

#include "common/simd/past_cache.h"
#include "optimizers/step.h"

namespace dsx {

constexpr int64_t kStreamedElements = 2048;  // stepped within the cache, then sent to memory
constexpr int64_t kLeastStreamed = 1 << 18;  // elements: smaller tensors may be read again soon
static_assert(kStreamedElements % kCodesBlock == 0);

template <class Rule>
class Streamed {
 public:
  Streamed(const StepTypes& types, const StepTensor<Rule::kStates>& whole)
      : whole_(whole), grad_bytes_(bytes_of(types.grad)), coded_(types.state == Format::codes) {
    const StepMemory<Rule::kStates>&source = whole.source, &target = whole.target;
    const bool has_master = source.master != nullptr;
    note(0, source.param, target.param,
         has_master ? bytes_of(types.param) : bytes_of(types.weight));
    note(1, source.master, target.master, bytes_of(types.weight));
    for (int j = 0; j < Rule::kStates; ++j) {
      note(kFirstState + j, source.states[j], target.states[j], bytes_of(types.state));
    }
  }

  // Whether there is anything to stream, and all of it lies so that it can be.
  bool is_worth_it() const {
    if (whole_.n < kLeastStreamed) return false;
    bool any = false;
    for (const Array& array : arrays_) {
      if (array.target == nullptr) continue;
      any = true;
      if (!begins_line(array.target)) return false;
    }
    return any;
  }

  // The elements from `first` on, a multiple of kCodesBlock, as a tensor of their own. Scales,
  // which are few, are written where they belong.
  StepTensor<Rule::kStates> part(int64_t first) {
    StepTensor<Rule::kStates> tensor = whole_;
    tensor.n = kStreamedElements;
    StepMemory<Rule::kStates>&source = tensor.source, &target = tensor.target;
    advance(tensor.grad, first * grad_bytes_);
    place(0, first, source.param, target.param);
    place(1, first, source.master, target.master);
    for (int j = 0; j < Rule::kStates; ++j) {
      place(kFirstState + j, first, source.states[j], target.states[j]);
      if (coded_ && source.scales[j] != nullptr) {
        source.scales[j] += first / kCodesBlock;
        target.scales[j] += first / kCodesBlock;
      }
    }
    return tensor;
  }

  // Sends what was written to them where it belongs, whole lines: copy(source, target, bytes).
  template <class Copy>
  void store(int64_t first, const Copy& copy) const {
    for (const Array& array : arrays_) {
      if (array.target == nullptr) continue;
      copy(array.cached, array.target + first * array.element_bytes,
           kStreamedElements * array.element_bytes);
    }
  }

 private:
  static constexpr int kFirstState = 2;
  static constexpr int kArrays = kFirstState + Rule::kStates;

  struct Array {
    char* target;  // null: it is written in place, or not at all
    int64_t element_bytes;
    alignas(64) char cached[kStreamedElements * sizeof(float)];
  };

  void note(int index, const void* source, void* target, int64_t element_bytes) {
    arrays_[index].target = source == target ? nullptr : static_cast<char*>(target);
    arrays_[index].element_bytes = element_bytes;
  }

  void place(int index, int64_t first, void*& source, void*& target) {
    Array& array = arrays_[index];
    advance(source, first * array.element_bytes);
    if (array.target == nullptr) {
      advance(target, first * array.element_bytes);
    } else {
      target = array.cached;
    }
  }

  static void advance(void*& address, int64_t bytes) {
    if (address != nullptr) address = static_cast<char*>(address) + bytes;
  }

  const StepTensor<Rule::kStates>& whole_;
  const int64_t grad_bytes_;
  const bool coded_;
  Array arrays_[kArrays];
};

}  // namespace dsx
