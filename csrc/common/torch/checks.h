// The checks that ops make on their tensors, in one wording for the whole library:
// `<op>: <argument> <is/has> <got>, expected <want>`. They throw std::invalid_argument, which
// Python sees as ValueError.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "common/overlap.h"
#include "common/torch/print.h"
#include "common/torch/tensor_view.h"

namespace dsx {

// Builds the message only if the condition fails.
template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// The number as kernels have it.
inline float finite_float(const char* op, const char* argument, double number) {
  check(std::abs(number) <= std::numeric_limits<float>::max(), op, ": ", argument, " is ", number,
        ", expected a finite float32");
  return float(number);
}

inline int32_t torch_code(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32: return aoti_torch_dtype_float32();
    case Dtype::bfloat16: return aoti_torch_dtype_bfloat16();
    case Dtype::float16: return aoti_torch_dtype_float16();
  }
  return -1;
}

// The dtype of the tensor. Throws if kernels cannot store it.
inline Dtype storage_dtype(const char* op, const Item& item, const TensorView& view) {
  for (Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16}) {
    if (view.dtype == torch_code(dtype)) return dtype;
  }
  check(false, op, ": ", item, " is ", DtypeCode{view.dtype},
        ", expected float32, bfloat16 or float16");
  return {};
}

inline void check_length(const char* op, const Item& argument, size_t got, size_t want) {
  check(got == want, op, ": ", argument, " has length ", got, ", expected ", want);
}

inline void check_device(const char* op, const Item& item, const TensorView& got,
                         const TensorView& want) {
  check(got.same_device(want), op, ": ", item, " is on ",
        DeviceCode{got.device_type, got.device_index}, ", expected ",
        DeviceCode{want.device_type, want.device_index});
}

// `want` is a Dtype, or has a torch_code and a name as that has.
template <class Type>
void check_dtype(const char* op, const Item& item, const TensorView& got, Type want) {
  check(got.dtype == torch_code(want), op, ": ", item, " is ", DtypeCode{got.dtype}, ", expected ",
        want);
}

inline void check_shape(const char* op, const Item& item, const TensorView& got,
                        const TensorView& want) {
  check(got.same_shape(want), op, ": ", item, " has shape ", Integers{got.sizes, got.dim},
        ", expected ", Integers{want.sizes, want.dim});
}

inline void check_layout(const char* op, const Item& item, const TensorView& got,
                         const TensorView& want) {
  check(got.same_layout(want), op, ": ", item, " has strides ", Integers{got.strides, got.dim},
        ", expected ", Integers{want.strides, want.dim});
}

inline void check_dense(const char* op, const Item& item, const TensorView& got) {
  check(got.is_dense(), op, ": ", item, " has strides ", Integers{got.strides, got.dim},
        " for shape ", Integers{got.sizes, got.dim},
        ", expected a dense layout, without gaps or overlaps");
}

inline void check_flat(const char* op, const Item& item, const TensorView& got) {
  check(got.dim == 1 && (got.numel < 2 || got.strides[0] == 1), op, ": ", item, " has shape ",
        Integers{got.sizes, got.dim}, " and strides ", Integers{got.strides, got.dim},
        ", expected one contiguous dimension");
}

// A tensor keeps its shape when its storage is freed, as sharded training does between uses.
inline void check_memory(const char* op, const Item& item, const TensorView& got) {
  check(got.data != nullptr || got.numel == 0, op, ": ", item, " has no memory, expected ",
        got.numel, " elements");
}

enum class Use { read, write };

// No element of it is another one: sorted by distance, each dimension begins beyond the one before.
inline void check_no_overlap(const char* op, const Item& item, const TensorView& view) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // distance, length
  for (int64_t i = 0; i < view.dim; ++i) {
    if (view.sizes[i] > 1) dims.emplace_back(view.strides[i], view.sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // the furthest element of the dimensions so far
  for (const auto& [stride, size] : dims) {
    check(stride > reach || view.numel == 0, op, ": ", item, " has strides ",
          Integers{view.strides, view.dim}, " for shape ", Integers{view.sizes, view.dim},
          ", expected no element to be another one");
    reach += stride * (size - 1);
  }
}

// The tensors of one call, each with any strides: none that is written has a byte in common with
// another one. Slices of one buffer that interleave are separate.
class SeparateTensors {
 public:
  SeparateTensors(const char* op, size_t expected) : op_(op) { tensors_.reserve(expected); }

  void add(const Item& item, const TensorView& view, Use use) {
    check_memory(op_, item, view);
    const Used added(item, view, use);
    for (const Used& before : tensors_) {
      if (use == Use::read && before.use == Use::read) continue;
      check(!before.overlaps(added), op_, ": ", item, " is overlapping ", before.item,
            ", expected separate memory");
    }
    tensors_.push_back(added);
  }

  // An optional one.
  template <class Optional>
  void add_if_given(const Item& item, const Optional& tensor, Use use) {
    if (tensor.has_value()) add(item, TensorView(tensor->get()), use);
  }

 private:
  struct Used {
    TensorView view;
    int64_t element_bytes, reach;  // bytes from its first to behind its last one
    Use use;
    Item item;

    Used(const Item& of, const TensorView& seen, Use used)
        : view(seen),
          element_bytes(int64_t(aoti_torch_dtype_element_size(seen.dtype))),
          reach(element_bytes),
          use(used),
          item(of) {
      for (int64_t i = 0; i < view.dim; ++i) {
        reach += (view.sizes[i] - 1) * view.strides[i] * element_bytes;
      }
    }

    // Looks closely only where one begins within what the other reaches over, as few do.
    bool overlaps(const Used& other) const {
      const auto begin = reinterpret_cast<uintptr_t>(view.data);
      const auto other_begin = reinterpret_cast<uintptr_t>(other.view.data);
      if (view.numel == 0 || other.view.numel == 0) return false;
      if (begin >= other_begin + uintptr_t(other.reach)) return false;
      if (other_begin >= begin + uintptr_t(reach)) return false;
      return overlap(bytes(), other.bytes());
    }

    StridedBytes bytes() const {
      return {view.data, element_bytes, view.sizes, view.strides, view.dim};
    }
  };
  const char* op_;
  std::vector<Used> tensors_;
};

// Memory of dense tensors that an op reads or writes, thousands of them, for the same check.
class MemoryRanges {
 public:
  MemoryRanges(const char* op, size_t expected) : op_(op) { ranges_.reserve(expected); }

  void add(const Item& item, const TensorView& view, int64_t element_bytes, Use use) {
    check_memory(op_, item, view);
    if (view.numel == 0) return;
    ranges_.push_back({view.data, view.data + view.numel * element_bytes, use, item});
  }

  // No range that is written shares memory with any other.
  void check_separate() {
    const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
    if (!std::is_sorted(ranges_.begin(), ranges_.end(), before)) {
      std::sort(ranges_.begin(), ranges_.end(), before);
    }
    const Range none{nullptr, nullptr, Use::read, {"", 0}};
    const Range* furthest = &none;          // of the ranges so far, the one that reaches furthest
    const Range* furthest_written = &none;  // the same among those that are written
    for (const Range& range : ranges_) {
      const Range* earlier = range.use == Use::write ? furthest : furthest_written;
      check(earlier->end <= range.begin, op_, ": ", range.item, " is overlapping ", earlier->item,
            ", expected separate memory");
      if (range.end > furthest->end) furthest = &range;
      if (range.use == Use::write && range.end > furthest_written->end) {
        furthest_written = &range;
      }
    }
  }

 private:
  struct Range {
    const char* begin;
    const char* end;
    Use use;
    Item item;
  };
  const char* op_;
  std::vector<Range> ranges_;
};

}  // namespace dsx
