// Storage of a dtype chosen at run time, for tests that go through all of them.
#pragma once

#include <vector>

#include "common/pointer.h"

constexpr dsx::Dtype kDtypes[] = {dsx::Dtype::float32, dsx::Dtype::bfloat16, dsx::Dtype::float16};
constexpr const char* kDtypeNames[] = {"float32", "bfloat16", "float16"};  // indexed by Dtype

inline float read(dsx::Dtype dtype, const void* elements, int64_t i) {
  switch (dtype) {
    case dsx::Dtype::bfloat16: return to_float(static_cast<const dsx::BFloat16*>(elements)[i]);
    case dsx::Dtype::float16: return to_float(static_cast<const dsx::Half*>(elements)[i]);
    default: return static_cast<const float*>(elements)[i];
  }
}

inline void write(dsx::Dtype dtype, void* elements, int64_t i, float value) {
  switch (dtype) {
    case dsx::Dtype::bfloat16:
      static_cast<dsx::BFloat16*>(elements)[i] = dsx::from_float<dsx::BFloat16>(value);
      return;
    case dsx::Dtype::float16:
      static_cast<dsx::Half*>(elements)[i] = dsx::from_float<dsx::Half>(value);
      return;
    default: static_cast<float*>(elements)[i] = value; return;
  }
}

// `n` elements that begin one element past where the allocator aligned them, and end where the
// allocation ends.
class Elements {
 public:
  Elements(dsx::Dtype dtype, int64_t n)
      : dtype_(dtype), bytes_(size_t(n + 1) * (dtype == dsx::Dtype::float32 ? 4 : 2)) {}

  dsx::Dtype dtype() const { return dtype_; }
  void* address() { return bytes_.data() + (dtype_ == dsx::Dtype::float32 ? 4 : 2); }
  float operator[](int64_t i) const {
    return read(dtype_, const_cast<Elements*>(this)->address(), i);
  }
  void set(int64_t i, float value) { write(dtype_, address(), i, value); }

 private:
  dsx::Dtype dtype_;
  std::vector<char> bytes_;
};
