// Parameters and state as floats in the registers of a thread, whatever they are stored as.
#pragma once

#include "common/cuda/fetch.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/vector_io.cuh"
#include "common/math.h"
#include "optimizers/step.h"

namespace dsx {

#include "common/noise_math.inl"
#include "optimizers/storage_math.inl"

namespace cuda {

// The weights of a parameter from `first` on as floats, and their way back into memory.
template <class T>
struct Parameter {
  static constexpr bool kMayHaveMaster = !std::is_same_v<T, BFloat16>;
  Pointer<T> begin;
  Pointer<Any> rounded;  // what the model has of a float32 original; or null

  template <int kStates>
  __device__ Parameter(const StepTypes& types, const StepMemory<kStates>& memory, int64_t first)
      : begin(Pointer<T>::to(memory.weight(types.weight), dtype_of(types.weight)) + first),
        rounded(Pointer<Any>::to(memory.master == nullptr ? nullptr : memory.param, types.param)) {
    if (rounded) rounded = rounded + first;
  }

  // For elements in memory of the block, of which `free_memory` is the rest.
  static constexpr int kBytes = sizeof(T);
  __device__ Parameter(char*& free_memory, int elements)
      : begin{reinterpret_cast<T*>(free_memory)}, rounded{} {
    free_memory += elements * kBytes;
  }
  template <Access access, int kCount>
  __device__ void fetch_to(const Parameter& near, int at, int i) const {
    fetch<access, kCount>(near.begin.address + at, begin.address + i);
  }

  template <Access access, int kCount>
  __device__ Floats<kCount> load(int i, int count) const {
    return cuda::load<access, kCount>(begin + i, count);
  }
  template <Access access, int kCount>
  __device__ void store(int i, const Floats<kCount>& values, int count) const {
    cuda::store<access>(begin + i, values, count);
    if constexpr (kMayHaveMaster) {
      if (rounded) cuda::store<access>(rounded + i, values, count);
    }
  }
};

template <>
struct Parameter<Split> {
  uint16_t* upper;
  int16_t* lower;

  template <int kStates>
  __device__ Parameter(const StepTypes& /*types*/, const StepMemory<kStates>& memory, int64_t first)
      : upper(static_cast<uint16_t*>(memory.param) + first),
        lower(static_cast<int16_t*>(memory.master) + first) {}

  static constexpr int kBytes = sizeof(uint16_t) + sizeof(int16_t);
  __device__ Parameter(char*& free_memory, int elements)
      : upper(reinterpret_cast<uint16_t*>(free_memory)),
        lower(reinterpret_cast<int16_t*>(upper + elements)) {
    free_memory += elements * kBytes;
  }
  template <Access access, int kCount>
  __device__ void fetch_to(const Parameter& near, int at, int i) const {
    fetch<access, kCount>(near.upper + at, upper + i);
    fetch<access, kCount>(near.lower + at, lower + i);
  }

  template <Access access, int kCount>
  __device__ Floats<kCount> load(int i, int count) const {
    if constexpr (access == Access::vector) {
      Floats<kCount> joined;
      const auto uppers = load_pairs<kCount>(upper + i), lowers = load_pairs<kCount>(lower + i);
#pragma unroll
      for (int k = 0; k < kCount; k += 2) {
        const uint32_t two = uppers.lanes[k / 2];
        const int32_t lower_two = int32_t(lowers.lanes[k / 2]);
        joined.lanes[k] = join_halves(float_of(two << 16), uint32_t(int32_t(int16_t(lower_two))));
        joined.lanes[k + 1] = join_halves(float_of(two & 0xffff0000), uint32_t(lower_two >> 16));
      }
      return joined;
    }
    const auto uppers = load_elements<access, kCount>(upper + i, count);
    const auto lowers = load_elements<access, kCount>(lower + i, count);
    Floats<kCount> values;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      values.lanes[k] = join_halves(float_of(uint32_t(uppers.lanes[k]) << 16),
                                    uint32_t(int32_t(lowers.lanes[k])));
    }
    return values;
  }
  template <Access access, int kCount>
  __device__ void store(int i, const Floats<kCount>& values, int count) const {
    Elements<uint16_t, kCount> uppers;
    Elements<int16_t, kCount> lowers;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t bits = bits_to_split<uint32_t>(values.lanes[k]);
      uppers.lanes[k] = uint16_t(round_half_up(bits) >> 16);
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

// The state of a parameter from `first` on as floats, and its way back into memory, after which the
// floats are what is there.
template <class Rule, class T, class Grad>
struct States {
  using Loop = StatesOfLoop<Rule, Grad>;
  static constexpr int kStates = Loop::kCount;
  Pointer<T> begins[kStates];
  Noise noise;

  __device__ States(const StepTypes& types, const StepMemory<Rule::kStates>& memory,
                    const Noise& noise_of_step, int64_t first)
      : noise(noise_from(noise_of_step, first)) {
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      begins[j] = Pointer<T>::to(memory.states[j], dtype_of(types.state));
      if (!absent(j)) begins[j] = begins[j] + first;
    }
    noise.on = noise.on && types.state == Format::bfloat16;
  }

  template <Access access, int kCount>
  __device__ void load(int /*at*/, int i, int count,
                       Floats<kCount> (&values)[Rule::kStates]) const {
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (!absent(j)) values[j] = cuda::load<access, kCount>(begins[j] + i, count);
    }
  }

  template <Access access, int kCount>
  __device__ void store(int i, int count, Floats<kCount> (&values)[Rule::kStates]) const {
    if (noise.on) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t random = random_bits(noise, uint32_t(i + place_of<access, kCount>(k)));
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

// Elements of a block whose state is in codes. The work before the first one takes longer than
// usual.
constexpr int64_t kCodedChunk = 32768;

// Eight values that are stored as codes.
template <Access access>
__device__ inline void load_codes(const uint8_t* source, int count, float scale, bool is_signed,
                                  Floats<8>& values) {
  if constexpr (access != Access::single) {
    const auto words = load_words<access>(source);
    const uint32_t floor = is_signed ? kSignedFloor : kUnsignedFloor;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t word = words.lanes[k / 4];
      const uint32_t magnitudes = is_signed ? word & 0x7f7f7f7f : word;
      const uint32_t magnitude = __byte_perm(magnitudes, 0, 0x4440 | k % 4);
      values.lanes[k] = decode_sum<float>((magnitude << kCutBits) + floor, word << (24 - k % 4 * 8),
                                          scale, is_signed);
    }
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t code = k < count ? uint32_t(source[k]) << 24 : 0;
      values.lanes[k] = decode<float>(code, scale, is_signed);
    }
  }
}

// The same for state in codes: the threads of a warp hold one block between them.
template <class Rule, class Grad>
struct States<Rule, Codes, Grad> {
  using Loop = StatesOfLoop<Rule, Grad>;
  static constexpr int kStates = Loop::kCount;
  uint8_t* begins[kStates];
  float* scales[kStates];
  Noise noise;

  __device__ States(const StepTypes& /*types*/, const StepMemory<Rule::kStates>& memory,
                    const Noise& noise_of_step, int64_t first)
      : noise(noise_from(noise_of_step, first)) {
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      begins[j] = static_cast<uint8_t*>(memory.states[j]);
      scales[j] = memory.scales[j];
      if (absent(j)) continue;
      begins[j] += first;
      scales[j] += first / kCodesBlock;
    }
  }

  // For codes in memory of the block, of which `free_memory` is the rest, and scales of the whole
  // chunk.
  __device__ States(char*& free_memory, int elements,
                    float (&scales_of_chunk)[kStates][kCodedChunk / kCodesBlock])
      : noise{} {
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      begins[j] = reinterpret_cast<uint8_t*>(free_memory);
      scales[j] = scales_of_chunk[j];
      free_memory += elements;
    }
  }
  template <Access access, int kCount>
  __device__ void fetch_to(const States& near, int at, int i) const {
#pragma unroll
    for (int j = 0; j < kStates; ++j) fetch<access, kCount>(near.begins[j] + at, begins[j] + i);
  }
  // Each warp copies the scales of the blocks of codes that it takes, of which `end` is the end.
  __device__ void copy_scales_to(const States& near, int end) const {
    constexpr int kWarps = kThreads / 32;
    int k = int(threadIdx.x) / 32 + int(threadIdx.x) % 32 * kWarps;
    for (; k * kCodesBlock < end; k += kThreads) {
#pragma unroll
      for (int j = 0; j < kStates; ++j) near.scales[j][k] = scales[j][k];
    }
  }

  // Elements from i on of the chunk, whose codes are at `at`.
  template <Access access, int kCount>
  __device__ void load(int at, int i, int count, Floats<kCount> (&values)[Rule::kStates]) const {
    static_assert(kCount * 32 == kCodesBlock);
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (absent(j)) continue;
      const float scale = scales[j][unsigned(i) / kCodesBlock];
      load_codes<access>(begins[j] + at, count, scale, Rule::is_signed(j), values[j]);
    }
  }

  template <Access access, int kCount>
  __device__ void store(int i, int count, Floats<kCount> (&values)[Rule::kStates]) const {
    float scale[kStates], inverse[kStates];
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (absent(j)) continue;
      uint32_t largest = 0;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        uint32_t bits = bits_of(values[j].lanes[k]);
        if (Rule::is_signed(j)) bits <<= 1;  // without the sign
        if (k < count) largest = dsx::max(largest, bits);
      }
      if (Rule::is_signed(j)) largest >>= 1;
      scale[j] = scale_of_block(max_of_warp(largest));
      inverse[j] = inverse_of_scale(scale[j]);
      if (i % kCodesBlock == 0) scales[j][unsigned(i) / kCodesBlock] = scale[j];
    }
    uint32_t random[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) random[k] = kNearest;
    if (noise.on) {
#pragma unroll
      for (int k = 0; k < kCount; ++k)
        random[k] = random_bits(noise, uint32_t(i + place_of<access, kCount>(k)));
    }
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (absent(j)) continue;
      uint32_t codes[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        codes[k] = encode(values[j].lanes[k], inverse[j], half_in_middle(random[k], j),
                          Rule::is_signed(j));
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

// What a step reads, or writes, from `first` on.
template <class Rule, class Param, class Grad, class State>
struct Operands {
  Parameter<Param> parameter;
  Pointer<Grad> grads;
  States<Rule, State, Grad> states;

  __device__ Operands(const StepTypes& types, const StepMemory<Rule::kStates>& memory, void* grad,
                      const Noise& noise, int64_t first)
      : parameter(types, memory, first),
        grads(Pointer<Grad>::to(grad, types.grad) + first),
        states(types, memory, noise, first) {}

  // What it reads, in memory of the block: so many elements.
  static constexpr int kBytes =
      Parameter<Param>::kBytes + sizeof(Grad) + StatesOfLoop<Rule, Grad>::kCount;
  template <class Scales>
  __device__ Operands(char* free_memory, int elements, Scales& scales)
      : parameter(free_memory, elements),
        grads{reinterpret_cast<Grad*>(free_memory)},
        states(free_memory += elements * sizeof(Grad), elements, scales) {}

  // Begins to copy kCount elements, from i on here to `at` there.
  template <Access access, int kCount>
  __device__ void fetch_to(const Operands& near, int at, int i) const {
    parameter.template fetch_to<access, kCount>(near.parameter, at, i);
    if constexpr (reads_grads(pass_of<Rule>())) {
      fetch<access, kCount>(near.grads.address + at, grads.address + i);
    }
    states.template fetch_to<access, kCount>(near.states, at, i);
  }
};

// Whether every access of kCount elements of these weights and states is aligned.
template <int kCount, int kStates>
bool is_aligned(const StepTypes& types, const StepMemory<kStates>& memory) {
  const int64_t master_bytes = types.weight == Format::split ? 2 : 4;
  bool aligned = is_aligned<kCount>(memory.param, bytes_of(types.param)) &&
                 is_aligned<kCount>(memory.master, master_bytes);
  for (int j = 0; j < kStates; ++j) {
    aligned = aligned && is_aligned<kCount>(memory.states[j], bytes_of(types.state));
  }
  return aligned;
}

}  // namespace cuda
}  // namespace dsx
