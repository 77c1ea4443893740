// Parameters and state as floats in the registers of a thread, whatever they are stored as.
#pragma once

#include "common/cuda/launch.cuh"
#include "common/cuda/vector_io.cuh"
#include "common/math.h"
#include "optimizers/step.h"

namespace dsx {

#include "optimizers/storage_math.inl"

namespace cuda {

// The elements of a parameter as floats, and their way back into memory.
template <class T>
struct Parameter {
  Pointer<T> begin;
  Pointer<Any> copy;

  __device__ Parameter(const StepTypes& types, void* param, void* param_copy)
      : begin(Pointer<T>::to(param, types.param)),
        copy(Pointer<Any>::to(param_copy, types.param_copy)) {}

  template <Access access, int kCount>
  __device__ Floats<kCount> load(int64_t i, int count) const {
    return cuda::load<access, kCount>(begin + i, count);
  }
  template <Access access, int kCount>
  __device__ void store(int64_t i, const Floats<kCount>& values, int count) const {
    cuda::store<access>(begin + i, values, count);
    if (copy) cuda::store<access>(copy + i, values, count);
  }
};

template <>
struct Parameter<Split> {
  uint16_t* upper;
  int16_t* lower;

  __device__ Parameter(const StepTypes& /*types*/, void* param, void* param_copy)
      : upper(static_cast<uint16_t*>(param)), lower(static_cast<int16_t*>(param_copy)) {}

  template <Access access, int kCount>
  __device__ Floats<kCount> load(int64_t i, int count) const {
    const auto uppers = load_elements<access, kCount>(upper + i, count);
    const auto lowers = load_elements<access, kCount>(lower + i, count);
    Floats<kCount> values;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      values.lanes[k] =
          join_halves<float>(uint32_t(uppers.lanes[k]), uint32_t(int32_t(lowers.lanes[k])));
    }
    return values;
  }
  template <Access access, int kCount>
  __device__ void store(int64_t i, const Floats<kCount>& values, int count) const {
    Elements<uint16_t, kCount> uppers;
    Elements<int16_t, kCount> lowers;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t bits = bits_to_split<uint32_t>(values.lanes[k]);
      uppers.lanes[k] = uint16_t(upper_half(bits));
      lowers.lanes[k] = int16_t(bits);
    }
    store_elements<access>(upper + i, uppers, count);
    store_elements<access>(lower + i, lowers, count);
  }
};

// What the values are once they have been stored.
template <class T, int kCount>
__device__ void round_as_stored(Pointer<T> /*target*/, Floats<kCount>& values) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) values.lanes[k] = widen(narrow<T>(values.lanes[k]));
}

template <int kCount>
__device__ void round_as_stored(Pointer<Any> target, Floats<kCount>& values) {
  if (target.dtype == Dtype::bfloat16) round_as_stored(Pointer<BFloat16>{}, values);
  if (target.dtype == Dtype::float16) round_as_stored(Pointer<Half>{}, values);
}

// The state of a parameter as floats, and its way back into memory, after which the floats are what
// is there.
template <class Rule, class T, class Grad>
struct States {
  using Loop = StatesOfLoop<Rule, Grad>;
  static constexpr int kStates = Loop::kCount;
  Pointer<T> begins[kStates];
  Noise noise;

  __device__ States(const StepTypes& types, const StepTensor<Rule::kStates>& tensor,
                    const Noise& noise_of_step)
      : noise(noise_of_step) {
#pragma unroll
    for (int j = 0; j < kStates; ++j) begins[j] = Pointer<T>::to(tensor.states[j], types.state);
    noise.on = noise.on && types.state == Dtype::bfloat16;
  }

  template <Access access, int kCount>
  __device__ void load(int64_t i, int count, Floats<kCount> (&values)[Rule::kStates]) const {
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (!absent(j)) values[j] = cuda::load<access, kCount>(begins[j] + i, count);
    }
  }

  template <Access access, int kCount>
  __device__ void store(int64_t i, int count, Floats<kCount> (&values)[Rule::kStates]) const {
    if (noise.on) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t random = random_bits(noise, uint32_t(i + k));
#pragma unroll
        for (int j = 0; j < kStates; ++j) {
          values[j].lanes[k] = round_to_bfloat16(values[j].lanes[k], half_of(random, j));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (absent(j)) continue;
      cuda::store<access>(begins[j] + i, values[j], count);
      if constexpr (measures(pass_of<Rule>())) round_as_stored(begins[j], values[j]);
    }
  }

 private:
  __device__ bool absent(int j) const { return Loop::absent(begins[j].address); }
};

// The same for state in codes: the threads of a warp hold one block between them.
template <class Rule, class Grad>
struct States<Rule, Codes, Grad> {
  using Loop = StatesOfLoop<Rule, Grad>;
  static constexpr int kStates = Loop::kCount;
  uint8_t* begins[kStates];
  float* scales[kStates];
  Noise noise;

  __device__ States(const StepTypes& /*types*/, const StepTensor<Rule::kStates>& tensor,
                    const Noise& noise_of_step)
      : noise(noise_of_step) {
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      begins[j] = static_cast<uint8_t*>(tensor.states[j]);
      scales[j] = tensor.scales[j];
    }
  }

  template <Access access, int kCount>
  __device__ void load(int64_t i, int count, Floats<kCount> (&values)[Rule::kStates]) const {
    static_assert(kCount * 32 == kCodesBlock);
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (absent(j)) continue;
      const float scale = scales[j][i / kCodesBlock];
      uint32_t codes[kCount];
      load_highest_bytes<access>(begins[j] + i, count, codes);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        values[j].lanes[k] = decode<float>(codes[k], scale, Rule::is_signed(j));
      }
    }
  }

  template <Access access, int kCount>
  __device__ void store(int64_t i, int count, Floats<kCount> (&values)[Rule::kStates]) const {
    float scale[kStates], inverse[kStates];
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (absent(j)) continue;
      uint32_t largest = 0;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        uint32_t bits = bits_of(values[j].lanes[k]);
        if (Rule::is_signed(j)) bits &= 0x7fffffff;
        if (k < count) largest = dsx::max(largest, bits);
      }
      scale[j] = scale_of_block(max_of_warp(largest));
      inverse[j] = inverse_of_scale(scale[j]);
      if (i % kCodesBlock == 0) scales[j][i / kCodesBlock] = scale[j];
    }
    uint32_t random[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) random[k] = kNearest;
    if (noise.on) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) random[k] = random_bits(noise, uint32_t(i + k));
    }
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (absent(j)) continue;
      uint32_t codes[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        codes[k] =
            encode(values[j].lanes[k], inverse[j], half_of(random[k], j), Rule::is_signed(j));
        if constexpr (measures(pass_of<Rule>())) {
          const uint32_t code = codes[k] & 0xff000000;
          values[j].lanes[k] = decode<float>(code, scale[j], Rule::is_signed(j));
        }
      }
      store_highest_bytes<access>(begins[j] + i, codes, count);
    }
  }

 private:
  __device__ bool absent(int j) const { return Loop::absent(begins[j]); }
};

// Whether every access of kCount elements of this tensor is aligned.
template <int kCount, int kStates>
__device__ bool is_aligned(const StepTypes& types, const StepTensor<kStates>& tensor) {
  bool aligned = is_aligned<kCount>(tensor.param, bytes_of(types.param)) &&
                 is_aligned<kCount>(tensor.grad, bytes_of(types.grad)) &&
                 is_aligned<kCount>(tensor.param_copy, bytes_of(types.param_copy));
#pragma unroll
  for (int j = 0; j < kStates; ++j) {
    aligned = aligned && is_aligned<kCount>(tensor.states[j], bytes_of(types.state));
  }
  return aligned;
}

}  // namespace cuda
}  // namespace dsx
