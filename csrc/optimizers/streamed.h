// Results of a step that go to other memory than they came from, past the cache: an ordinary store
// reads the line that it writes to first, a third more of all that such a step moves.
#pragma once

#include <cstring>

#include "common/simd/past_cache.h"
#include "optimizers/step.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace dsx {

constexpr int64_t kStreamedElements = 2048;  // stepped within the cache, then sent to memory
constexpr int64_t kLeastStreamed = 1 << 18;  // elements: smaller tensors may be read again soon
constexpr int64_t kStreamedBytes = 16;       // of one store
static_assert(kStreamedElements % kCodesBlock == 0);

// Copies between aligned places; the bytes are a multiple of a store's.
inline void stream(void* target, const void* source, int64_t bytes) {
#ifdef __SSE2__
  auto* to = static_cast<__m128i*>(target);
  const auto* from = static_cast<const __m128i*>(source);
  for (int64_t i = 0; i < bytes / kStreamedBytes; ++i) {
    _mm_stream_si128(to + i, _mm_load_si128(from + i));
  }
#else
  memcpy(target, source, size_t(bytes));
#endif
}

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
      if (reinterpret_cast<uintptr_t>(array.target) % kStreamedBytes != 0) return false;
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

  // Sends what was written to them where it belongs.
  void store(int64_t first) const {
    for (const Array& array : arrays_) {
      if (array.target == nullptr) continue;
      stream(array.target + first * array.element_bytes, array.cached,
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
