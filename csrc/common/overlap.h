// Whether two tensors have a byte of memory in common: not the ranges from their first to their
// last one, which interleave where both are slices of one buffer, as q and k of a fused projection
// are, but what they have of them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dsx {

// The bytes of a tensor: a block at each place that the dimensions lead to, those that join taken
// as one.
struct StridedBytes {
  static constexpr int kMostDims = 12;
  struct Dim {
    int64_t stride, size;  // bytes; at least 2
  };

  const char* begin;
  int64_t block;  // bytes; 0 if there are none
  int dims = 0;
  Dim dim[kMostDims];            // the smallest stride first
  int64_t reach[1 + kMostDims];  // of a block, and of the first 1, 2, ... dimensions, from `begin`

  StridedBytes(const void* data, int64_t element_bytes, const int64_t* sizes,
               const int64_t* strides, int64_t count)
      : begin(static_cast<const char*>(data)), block(element_bytes) {
    Dim sorted[64];  // torch has no more dimensions
    int kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (sizes[i] == 0) block = 0;
      if (sizes[i] < 2 || strides[i] == 0) continue;  // the same memory again
      sorted[kept++] = {strides[i] * element_bytes, sizes[i]};
    }
    std::sort(sorted, sorted + kept,
              [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
    for (int i = 0; i < kept; ++i) add(sorted[i]);
    reach[0] = block;
    for (int i = 0; i < dims; ++i) reach[i + 1] = reach[i] + (dim[i].size - 1) * dim[i].stride;
  }

 private:
  void add(const Dim& next) {
    if (dims == 0 && next.stride <= block) {
      block += next.stride * (next.size - 1);
    } else if (dims > 0 && next.stride == dim[dims - 1].stride * dim[dims - 1].size) {
      dim[dims - 1].size *= next.size;
    } else if (dims < kMostDims) {
      dim[dims++] = next;
    } else {  // taken as if it filled all that it reaches over
      block += next.stride * (next.size - 1);
    }
  }
};

// Compares from the outermost dimensions inwards: of most tensors that interleave they have the
// same strides, and then no more than a few places of one are near those of the other.
class OverlapSearch {
 public:
  OverlapSearch(const StridedBytes& a, const StridedBytes& b) : a_(a), b_(b) {}

  bool found() {
    if (a_.block == 0 || b_.block == 0) return false;
    return found(
        int64_t(reinterpret_cast<uintptr_t>(b_.begin) - reinterpret_cast<uintptr_t>(a_.begin)),
        a_.dims, b_.dims);
  }

 private:
  // Of the first so many dimensions of both, those of b `ahead` bytes further on.
  bool found(int64_t ahead, int a_dims, int b_dims) {
    const int64_t of_a = a_.reach[a_dims], of_b = b_.reach[b_dims];
    if (ahead >= of_a || ahead + of_b <= 0) return false;
    if (a_dims == 0 && b_dims == 0) return true;
    if (--steps_left_ < 0) return true;  // which nobody has shown not to be
    const StridedBytes::Dim none{0, 1};
    const auto& a = a_dims > 0 ? a_.dim[a_dims - 1] : none;
    const auto& b = b_dims > 0 ? b_.dim[b_dims - 1] : none;
    const int64_t stride = std::max(a.stride, b.stride);
    const bool walk_a = a.stride == stride, walk_b = b.stride == stride;
    a_dims -= walk_a, b_dims -= walk_b;
    // Places of a less those of b, counted in strides, where what is within them may overlap.
    const int64_t within_a = a_.reach[a_dims], within_b = b_.reach[b_dims];
    const int64_t first =
        std::max(walk_b ? 1 - b.size : 0, floor_div(ahead - within_a, stride) + 1);
    const int64_t last =
        std::min(walk_a ? a.size - 1 : 0, -floor_div(-ahead - within_b, stride) - 1);
    for (int64_t i = first; i <= last; ++i) {
      if (found(ahead - i * stride, a_dims, b_dims)) return true;
    }
    return false;
  }

  static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

  const StridedBytes &a_, &b_;
  int64_t steps_left_ = 100'000;  // less than a millisecond
};

inline bool overlap(const StridedBytes& a, const StridedBytes& b) {
  return OverlapSearch(a, b).found();
}

}  // namespace dsx
