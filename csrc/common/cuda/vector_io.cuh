// Loads and stores of several consecutive elements as floats: one access of up to 16 bytes where
// the address allows it, else element by element.
#pragma once

#include "common/cuda/convert.cuh"
#include "common/pointer.h"

namespace dsx::cuda {

template <int kCount>
struct Floats {
  float lanes[kCount];
};

template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Elements {
  T lanes[kCount];
};

// Whether kCount elements at this address can be accessed as Elements. True for null: no access.
template <int kCount>
__device__ inline bool is_aligned(const void* address, int64_t element_bytes) {
  const int64_t bytes = element_bytes * kCount < 16 ? element_bytes * kCount : 16;
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// How a thread reaches kCount elements: all of them at once, or one by one the first `count`.
enum class Access { vector, single };

template <Access access, int kCount, class T>
__device__ inline Elements<T, kCount> load_elements(const T* source, int count) {
  if constexpr (access == Access::vector) {
    return *reinterpret_cast<const Elements<T, kCount>*>(source);
  } else {
    Elements<T, kCount> elements{};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) elements.lanes[i] = source[i];
    }
    return elements;
  }
}

template <Access access, int kCount, class T>
__device__ inline void store_elements(T* target, const Elements<T, kCount>& elements, int count) {
  if constexpr (access == Access::vector) {
    *reinterpret_cast<Elements<T, kCount>*>(target) = elements;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) target[i] = elements.lanes[i];
    }
  }
}

template <Access access, int kCount, class T>
__device__ inline Floats<kCount> load(Pointer<T> source, int count) {
  const auto elements = load_elements<access, kCount>(source.address, count);
  Floats<kCount> result;
#pragma unroll
  for (int i = 0; i < kCount; ++i) result.lanes[i] = widen(elements.lanes[i]);
  return result;
}

template <Access access, int kCount, class T>
__device__ inline void store(Pointer<T> target, const Floats<kCount>& values, int count) {
  Elements<T, kCount> elements;
#pragma unroll
  for (int i = 0; i < kCount; ++i) elements.lanes[i] = narrow<T>(values.lanes[i]);
  store_elements<access>(target.address, elements, count);
}

template <Access access, int kCount>
__device__ inline Floats<kCount> load(Pointer<Any> source, int count) {
  const Dtype dtype = source.dtype;
  void* address = source.address;
  switch (dtype) {
    case Dtype::bfloat16: return load<access, kCount>(Pointer<BFloat16>::to(address, dtype), count);
    case Dtype::float16: return load<access, kCount>(Pointer<Half>::to(address, dtype), count);
    default: return load<access, kCount>(Pointer<float>::to(address, dtype), count);
  }
}

template <Access access, int kCount>
__device__ inline void store(Pointer<Any> target, const Floats<kCount>& values, int count) {
  const Dtype dtype = target.dtype;
  void* address = target.address;
  switch (dtype) {
    case Dtype::bfloat16:
      return store<access>(Pointer<BFloat16>::to(address, dtype), values, count);
    case Dtype::float16: return store<access>(Pointer<Half>::to(address, dtype), values, count);
    default: return store<access>(Pointer<float>::to(address, dtype), values, count);
  }
}

}  // namespace dsx::cuda
