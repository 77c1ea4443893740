// Loads and stores of several consecutive elements as floats: one access of up to 16 bytes where
// the address allows it, else element by element.
#pragma once

#include "common/cuda/convert.cuh"
#include "common/cuda/floats.cuh"
#include "common/pointer.h"

namespace dsx::cuda {

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

// Loads the highest byte of each of eight integers, of which the others are zero.
template <Access access>
__device__ inline void load_highest_bytes(const uint8_t* source, int count, uint32_t (&values)[8]) {
  if constexpr (access == Access::vector) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(source);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = __byte_perm(i < 4 ? bytes.x : bytes.y, 0, i % 4 << 12 | 0x0444);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = i < count ? uint32_t(source[i]) << 24 : 0;
  }
}

// The highest byte of each of four integers.
__device__ inline uint32_t highest_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0073), __byte_perm(c, d, 0x0073), 0x5410);
}

// Stores the highest byte of each of eight integers.
template <Access access>
__device__ inline void store_highest_bytes(uint8_t* target, const uint32_t (&values)[8],
                                           int count) {
  if constexpr (access == Access::vector) {
    *reinterpret_cast<uint2*>(target) =
        make_uint2(highest_bytes(values[0], values[1], values[2], values[3]),
                   highest_bytes(values[4], values[5], values[6], values[7]));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) target[i] = uint8_t(values[i] >> 24);
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
