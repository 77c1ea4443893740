// A head of a new token in the registers of a warp: normalised, rotated, and as it is stored.
// Element number i of a lane is number 32 i + lane of the head, and pair number i of it likewise.
#pragma once

#include <cuda_fp8.h>

#include "common/cuda/vector_io.cuh"
#include "common/cuda/warp.cuh"
#include "attention/cache/rope_append.h"

namespace dsx {

#include "attention/cache/rope_math.inl"

namespace cuda {

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
    if (element < width) target[element] = narrow<T>(elements[i]);
  });
}

// The norm of a head, by its weights.
template <int kEach>
__device__ inline void normalise(const RopeAppend& call, const float (&weights)[kEach],
                                 float (&elements)[kEach]) {
  float squares = 0;
#pragma unroll
  for (float each : elements) squares += each * each;
  const float factor = dsx::rsqrt(sum_of_warp(squares) / float(call.kv.width) + call.eps);
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
    each_pair([&](int i, int) {
      const double radians = radians_[i];
      const bool finite = is_finite(radians);
      const Angle angle = angle_at(position, finite ? in_turns(radians) : 0);
      const Value rest(finite ? angle.rest : float(radians - radians));
      by_[i] = rotation(rest, Value(angle.quarter_cos), Value(angle.quarter_sin), call_.scale);
    });
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
      for (int i = 0; i < kEach; ++i) elements[i] = narrow<T>(values[i]);
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
    const bool finite = isfinite(largest);
    const float exact = largest / Kind::kLargest;
    const bool none = !finite || exact < kLeastScale;
    const float factor = none ? 0.0f : Kind::kLargest / largest;
#pragma unroll
    for (int i = 0; i < kEach; ++i) elements[i] = none ? 0 : code_of<Kind>(values[i] * factor);
    scale = !finite ? NAN : none ? 0.0f : exact;
  }
};

}  // namespace cuda
}  // namespace dsx
