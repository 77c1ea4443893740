// A head of a new token in the registers of a warp: normalised, rotated, and as it is stored.
// Element number i of a lane is number 32 i + lane of the head, and pair number i of it likewise.
#pragma once

#include <cuda_fp8.h>

#include "common/cuda/vector_io.cuh"
#include "attention/cache/rope_angle_cuda.cuh"
#include "attention/cache/rope_append.h"

namespace dsx::cuda {

// Calls body(i, element) for all kEach elements of this lane, also for those behind a head.
template <int kEach, class Body>
__device__ inline void for_each_element(const Body& body) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) body(i, i * 32 + int(threadIdx.x) % 32);
}

// Calls body with a value of the storage type of this dtype: once for all that is done with it.
template <class Body>
__device__ inline void with_stored_type(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::bfloat16: return body(BFloat16{});
    case Dtype::float16: return body(Half{});
    case Dtype::float32: return body(float{});
  }
}

// Reads them, all at the same time; what is behind `width` is 0.
template <int kEach, class T>
__device__ inline void read_elements(const T* source, int width, float (&elements)[kEach]) {
  for_each_element<kEach>(
      [&](int i, int element) { elements[i] = element < width ? widen(source[element]) : 0.0f; });
}
template <int kEach>
__device__ inline void read_elements(Pointer<Any> source, int width, float (&elements)[kEach]) {
  with_stored_type(source.dtype, [&](auto storage) {
    read_elements(static_cast<const decltype(storage)*>(source.address), width, elements);
  });
}

template <int kEach, class T>
__device__ inline void write_elements(T* target, int width, const float (&elements)[kEach]) {
  for_each_element<kEach>([&](int i, int element) {
    if (element < width) target[element] = converted<T>(elements[i]);
  });
}

// What the elements of a head are multiplied by, beside its weights: of the sum of their squares.
__device__ inline float norm_factor(const RopeAppend& call, float squares) {
  return dsx::rsqrt(squares / float(call.kv.width) + call.eps);
}

// The sum of the squares of a head, as any lanes add it up that have it: in a tree, first every 8
// consecutive ones, then those sums; of numbers whose indices differ by one bit, the highest first.
template <int kEach>
__device__ inline float sum_of_squares(const float (&elements)[kEach]) {
  static_assert((kEach & (kEach - 1)) == 0, "a tree of pairs");
  float sums[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    sums[i] = elements[i] * elements[i];
    for (int bit = 4; bit > 0; bit /= 2) sums[i] += __shfl_xor_sync(0xffffffff, sums[i], bit);
  }
#pragma unroll
  for (int half = kEach / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  for (int bit = 16; bit > 4; bit /= 2) sums[0] += __shfl_xor_sync(0xffffffff, sums[0], bit);
  return sums[0];
}

// The norm of a head, by its weights.
template <int kEach>
__device__ inline void normalise(const RopeAppend& call, const float (&weights)[kEach],
                                 float (&elements)[kEach]) {
  const float factor = norm_factor(call, sum_of_squares(elements));
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    elements[i] = elements[i] * factor * (weights[i] + call.weight_offset);
  }
}

// By how much the pairs of a lane are rotated.
template <int kEach>
class HeadRotation {
  static constexpr int kPairs = kEach / 2;
  using Value = Floats<1>;

 public:
  // Begins to read frequencies.
  __device__ explicit HeadRotation(const RopeAppend& call) : call_(call) {
    if (call.frequencies.is_double) {
      each_pair([&](int i, int pair) {
        radians_[i] = static_cast<const double*>(call.frequencies.data)[pair];
      });
    } else {
      each_pair([&](int i, int pair) { radians_[i] = call.frequencies.at(pair); });
    }
  }

  __device__ void move_to(uint64_t position) {
    each_pair([&](int i, int) { by_[i] = rotation_of(radians_[i], position, call_.scale); });
  }

  // Of a head that the warp has in shared memory.
  __device__ void rotate(float* head) const {
    each_pair([&](int i, int pair) {
      float& first = head[call_.interleaved ? 2 * pair : pair];
      float& second = head[call_.interleaved ? 2 * pair + 1 : int(call_.pairs) + pair];
      const Value a(first), b(second);
      first = rotated_first(a, b, by_[i]).lanes[0];
      second = rotated_second(a, b, by_[i]).lanes[0];
    });
  }

 private:
  template <class Body>
  __device__ void each_pair(const Body& body) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = i * 32 + int(threadIdx.x) % 32;
      if (pair < call_.pairs) body(i, pair);
    }
  }

  const RopeAppend& call_;
  double radians_[kPairs];
  Rotation<Value> by_[kPairs];
};

// Rotates elements by way of shared memory that the warp has for a head.
template <int kEach>
__device__ inline void rotate(const HeadRotation<kEach>& rotation, float* head,
                              float (&elements)[kEach]) {
  for_each_element<kEach>([&](int i, int element) { head[element] = elements[i]; });
  __syncwarp();
  rotation.rotate(head);
  __syncwarp();
  for_each_element<kEach>([&](int i, int element) { elements[i] = head[element]; });
}

template <class Kind>
__device__ inline uint8_t code_of(float value) {
  if constexpr (std::is_same_v<Kind, Int8Kv>) return uint8_t(__float2int_rn(value));
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

// How elements become codes, of a head whose largest one this is.
template <class Kind>
class Codes {
 public:
  float scale;  // what codes are to be multiplied by

  __device__ explicit Codes(float largest) {
    const bool finite = isfinite(largest);
    const float exact = largest / Kind::kLargest;
    none_ = !finite || exact < kLeastScale;
    factor_ = none_ ? 0.0f : Kind::kLargest / largest;
    scale = !finite ? NAN : none_ ? 0.0f : exact;
  }
  __device__ uint8_t of(float value) const { return none_ ? 0 : code_of<Kind>(value * factor_); }

 private:
  bool none_;
  float factor_;
};

// The elements as a cache of this kind has them: in T, or as codes, which are bytes, with a scale.
template <class Kind, class T, int kEach>
struct StoredHead {
  T elements[kEach];
  float scale;  // of codes

  __device__ StoredHead(const float (&values)[kEach], int width) {
    if constexpr (Kind::kQuantized) {
      encode(values, width);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) elements[i] = converted<T>(values[i]);
    }
  }

  __device__ void write(T* target, int width) const {
    for_each_element<kEach>([&](int i, int element) {
      if (element < width) target[element] = elements[i];
    });
  }

 private:
  __device__ void encode(const float (&values)[kEach], int width) {
    float largest = 0;
    for_each_element<kEach>([&](int i, int element) {
      if (element < width) largest = dsx::max(largest, ::fabsf(values[i]));
    });
    for (int distance = 16; distance > 0; distance /= 2) {
      largest = dsx::max(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    }
    const Codes<Kind> codes(largest);
#pragma unroll
    for (int i = 0; i < kEach; ++i) elements[i] = codes.of(values[i]);
    scale = codes.scale;
  }
};

}  // namespace dsx::cuda
