// Pointer<T>: where a kernel finds n elements, with one face for a storage type that is fixed when
// the kernel is compiled (float, BFloat16, Half) and for one chosen at run time (Any).
#pragma once

#include <cstdint>

#include "common/checked.h"
#include "common/dtype.h"

namespace dsx {

template <class T>
struct Pointer {
  T* address;  // null: absent

  DSX_HOST_DEVICE static Pointer to(void* address, Dtype /*dtype*/) {
    return {static_cast<T*>(address)};
  }
  DSX_HOST_DEVICE explicit operator bool() const { return address != nullptr; }
  DSX_HOST_DEVICE Pointer operator+(int64_t elements) const {
    DSX_ASSERT(address != nullptr || elements == 0, "arithmetic on an absent row");
    return {address + elements};
  }
};

template <>
struct Pointer<Any> {
  void* address;  // null: absent
  Dtype dtype;    // of what lies there: float32, bfloat16 or float16

  DSX_HOST_DEVICE static Pointer to(void* address, Dtype dtype) { return {address, dtype}; }
  DSX_HOST_DEVICE explicit operator bool() const { return address != nullptr; }
  DSX_HOST_DEVICE Pointer operator+(int64_t elements) const {
    DSX_ASSERT(address != nullptr || elements == 0, "arithmetic on an absent row");
    return {static_cast<char*>(address) + elements * bytes_of(dtype), dtype};
  }
};

// Whether storage type T can hold what this dtype says.
template <class T>
constexpr bool holds(Dtype dtype);
template <>
constexpr bool holds<float>(Dtype dtype) {
  return dtype == Dtype::float32;
}
template <>
constexpr bool holds<BFloat16>(Dtype dtype) {
  return dtype == Dtype::bfloat16;
}
template <>
constexpr bool holds<Half>(Dtype dtype) {
  return dtype == Dtype::float16;
}
template <>
constexpr bool holds<Any>(Dtype dtype) {  // what its loads and stores have a branch for
  return dtype == Dtype::float32 || dtype == Dtype::bfloat16 || dtype == Dtype::float16;
}

}  // namespace dsx
