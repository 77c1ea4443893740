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
DSX_HOST_DEVICE inline bool is_aligned(const void* address, int64_t element_bytes) {
  const int64_t bytes = element_bytes * kCount < 16 ? element_bytes * kCount : 16;
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// How a thread reaches kCount elements: all of them at once; in two halves, of which the second one
// is kHalvesApart elements further (so that the accesses of a warp leave no gaps, although each
// thread has more than 16 bytes); or one by one the first `count`.
enum class Access { vector, halves, single };

constexpr int kHalvesApart = 128;

// Where element k of a thread is.
template <Access access, int kCount>
__device__ constexpr int place_of(int k) {
  return access == Access::halves && k >= kCount / 2 ? k + kHalvesApart - kCount / 2 : k;
}

template <Access access, int kCount, class T>
__device__ inline Elements<T, kCount> load_elements(const T* source, int count) {
  if constexpr (access == Access::vector) {
    return *reinterpret_cast<const Elements<T, kCount>*>(source);
  } else if constexpr (access == Access::halves) {
    Elements<T, kCount> elements;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto part =
          load_elements<Access::vector, kCount / 2>(source + half * kHalvesApart, kCount / 2);
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) elements.lanes[half * kCount / 2 + i] = part.lanes[i];
    }
    return elements;
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
  } else if constexpr (access == Access::halves) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Elements<T, kCount / 2> part;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) part.lanes[i] = elements.lanes[half * kCount / 2 + i];
      store_elements<Access::vector>(target + half * kHalvesApart, part, kCount / 2);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) target[i] = elements.lanes[i];
    }
  }
}

// Loads elements of 16 bits by twos: what is done to a half of 32 bits costs less than taking it
// out.
template <int kCount>
__device__ inline Elements<uint32_t, kCount / 2> load_pairs(const void* source) {
  return load_elements<Access::vector, kCount / 2>(static_cast<const uint32_t*>(source), 0);
}

// Eight bytes, as two words.
template <Access access>
__device__ inline Elements<uint32_t, 2> load_words(const uint8_t* source) {
  if constexpr (access == Access::vector) {
    return load_elements<access, 2>(reinterpret_cast<const uint32_t*>(source), 2);
  } else {
    return {*reinterpret_cast<const uint32_t*>(source),
            *reinterpret_cast<const uint32_t*>(source + kHalvesApart)};
  }
}

template <Access access>
__device__ inline void store_words(uint8_t* target, const Elements<uint32_t, 2>& words) {
  if constexpr (access == Access::vector) {
    store_elements<access>(reinterpret_cast<uint32_t*>(target), words, 2);
  } else {
    *reinterpret_cast<uint32_t*>(target) = words.lanes[0];
    *reinterpret_cast<uint32_t*>(target + kHalvesApart) = words.lanes[1];
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
  if constexpr (access == Access::single) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) target[i] = uint8_t(values[i] >> 24);
    }
  } else {
    Elements<uint32_t, 2> words;
    words.lanes[0] = highest_bytes(values[0], values[1], values[2], values[3]);
    words.lanes[1] = highest_bytes(values[4], values[5], values[6], values[7]);
    store_words<access>(target, words);
  }
}

template <Access access, int kCount, class T>
__device__ inline Floats<kCount> load(Pointer<T> source, int count) {
  Floats<kCount> result;
  if constexpr (std::is_same_v<T, BFloat16> && access == Access::vector) {
    const auto pairs = load_pairs<kCount>(source.address);
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      result.lanes[i] = dsx::float_of(pairs.lanes[i / 2] << 16);
      result.lanes[i + 1] = dsx::float_of(pairs.lanes[i / 2] & 0xffff0000);
    }
    return result;
  }
  const auto elements = load_elements<access, kCount>(source.address, count);
#pragma unroll
  for (int i = 0; i < kCount; ++i) result.lanes[i] = widen(elements.lanes[i]);
  return result;
}

template <Access access, int kCount, class T>
__device__ inline void store(Pointer<T> target, const Floats<kCount>& values, int count) {
  Elements<T, kCount> elements;
  if constexpr (std::is_same_v<T, BFloat16> && kCount % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {  // one instruction makes two
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values.lanes[i], values.lanes[i + 1]);
      elements.lanes[i] = {__bfloat16_as_ushort(pair.x)};
      elements.lanes[i + 1] = {__bfloat16_as_ushort(pair.y)};
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements.lanes[i] = narrow<T>(values.lanes[i]);
  }
  store_elements<access>(target.address, elements, count);
}

// The values as they are once they have been stored as this dtype.
template <int kCount>
__device__ inline Floats<kCount> rounded(Floats<kCount> values, Dtype dtype) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (dtype == Dtype::bfloat16) values.lanes[i] = widen(narrow<BFloat16>(values.lanes[i]));
    if (dtype == Dtype::float16) values.lanes[i] = widen(narrow<Half>(values.lanes[i]));
  }
  return values;
}

template <Access access, int kCount>
__device__ inline Floats<kCount> load(Pointer<Any> source, int count) {
  const Dtype dtype = source.dtype;
  void* address = source.address;
  switch (dtype) {
    case Dtype::bfloat16: return load<access, kCount>(Pointer<BFloat16>::to(address, dtype), count);
    case Dtype::float16: return load<access, kCount>(Pointer<Half>::to(address, dtype), count);
    case Dtype::float32: return load<access, kCount>(Pointer<float>::to(address, dtype), count);
  }
  __builtin_unreachable();
}

template <Access access, int kCount>
__device__ inline void store(Pointer<Any> target, const Floats<kCount>& values, int count) {
  const Dtype dtype = target.dtype;
  void* address = target.address;
  switch (dtype) {
    case Dtype::bfloat16:
      return store<access>(Pointer<BFloat16>::to(address, dtype), values, count);
    case Dtype::float16: return store<access>(Pointer<Half>::to(address, dtype), values, count);
    case Dtype::float32: return store<access>(Pointer<float>::to(address, dtype), values, count);
  }
}

}  // namespace dsx::cuda
