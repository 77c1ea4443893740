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

template <int kCount, class T>
__device__ inline Floats<kCount> load(Pointer<T> source) {
  const auto elements = *reinterpret_cast<const Elements<T, kCount>*>(source.address);
  Floats<kCount> result;
#pragma unroll
  for (int i = 0; i < kCount; ++i) result.lanes[i] = widen(elements.lanes[i]);
  return result;
}

template <int kCount, class T>
__device__ inline void store(Pointer<T> target, const Floats<kCount>& values) {
  Elements<T, kCount> elements;
#pragma unroll
  for (int i = 0; i < kCount; ++i) elements.lanes[i] = narrow<T>(values.lanes[i]);
  *reinterpret_cast<Elements<T, kCount>*>(target.address) = elements;
}

template <int kCount>
__device__ inline Floats<kCount> load(Pointer<Any> source) {
  switch (source.dtype) {
    case Dtype::bfloat16: return load<kCount>(Pointer<BFloat16>::to(source.address, source.dtype));
    case Dtype::float16: return load<kCount>(Pointer<Half>::to(source.address, source.dtype));
    default: return load<kCount>(Pointer<float>::to(source.address, source.dtype));
  }
}

template <int kCount>
__device__ inline void store(Pointer<Any> target, const Floats<kCount>& values) {
  switch (target.dtype) {
    case Dtype::bfloat16: return store(Pointer<BFloat16>::to(target.address, target.dtype), values);
    case Dtype::float16: return store(Pointer<Half>::to(target.address, target.dtype), values);
    default: return store(Pointer<float>::to(target.address, target.dtype), values);
  }
}

}  // namespace dsx::cuda
