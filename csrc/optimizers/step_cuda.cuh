// Optimizer steps on CUDA: a small kernel advances the steps of the tensors and works out what
// depends on them, then every block of the main kernel updates one chunk of one tensor. For the
// *_cuda.cu of an optimizer, which includes the Rule's formula before.
#pragma once

#include <algorithm>

#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/vector_io.cuh"
#include "common/math.h"
#include "optimizers/step.h"

namespace dsx {

#include "optimizers/storage_math.inl"

namespace cuda {

constexpr int kStepsPerLaunch = 1000;

// The tensors of a launch travel as kernel parameters: no copy to the device to wait for, and a
// CUDA graph captures them.
template <class Rule>
struct StepsOfLaunch {
  StepCall<Rule> call;
  float* steps[kStepsPerLaunch];  // [count] of them
  NoiseKey noise[kStepsPerLaunch];
  Prepared<Rule>* prepared;  // [count] written
  int count;
};

template <class Rule>
struct TensorsOfLaunch {
  static constexpr int kMost = int((kMaxKernelParameterBytes - sizeof(StepCall<Rule>) - 32) /
                                   (sizeof(StepTensor<Rule::kStates>) + sizeof(int)));
  StepCall<Rule> call;
  StepTensor<Rule::kStates> tensors[kMost];  // [count] of them
  int first_block[kMost];                    // [count] of each tensor
  const Prepared<Rule>* prepared;            // [count] device memory
  int count;
};

template <class Rule>
__global__ void advance_steps(const __grid_constant__ StepsOfLaunch<Rule> launch) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= launch.count || launch.call.found_inf.value() != 0) return;
  const float step = *launch.steps[i] + 1;
  *launch.steps[i] = step;
  launch.prepared[i] = prepare(launch.call, launch.noise[i], step);
}

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
          float_of(join_halves(uint32_t(uppers.lanes[k]), uint32_t(int32_t(lowers.lanes[k]))));
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

// The state of a parameter as floats, and its way back into memory.
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
          values[j].lanes[k] = round_to_bfloat16(values[j].lanes[k], part_of<16>(random, j));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (!absent(j)) cuda::store<access>(begins[j] + i, values[j], count);
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
      const auto codes = load_elements<access, kCount>(begins[j] + i, count);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        values[j].lanes[k] = decode<float>(uint32_t(codes.lanes[k]), scale, Rule::is_signed(j));
      }
    }
  }

  template <Access access, int kCount>
  __device__ void store(int64_t i, int count, Floats<kCount> (&values)[Rule::kStates]) const {
    float inverse[kStates];
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (absent(j)) continue;
      uint32_t largest = 0;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t bits = bits_of(values[j].lanes[k]) & 0x7fffffff;
        if (k < count) largest = max(largest, bits);
      }
      const float scale = scale_of_block(max_of_warp(largest));
      inverse[j] = inverse_of_scale(scale);
      if (i % kCodesBlock == 0) scales[j][i / kCodesBlock] = scale;
    }
    Elements<uint8_t, kCount> codes[kStates];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t random =
          noise.on ? random_bits(noise, uint32_t(i + k)) : nearest_bits<kRandomBits>();
#pragma unroll
      for (int j = 0; j < kStates; ++j) {
        if (absent(j)) continue;
        codes[j].lanes[k] = uint8_t(encode(values[j].lanes[k], inverse[j],
                                           part_of<kRandomBits>(random, j), Rule::is_signed(j)));
      }
    }
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      if (!absent(j)) store_elements<access>(begins[j] + i, codes[j], count);
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

template <class Rule, class Param, class Grad, class State>
__global__ void __launch_bounds__(kThreads)
    step_kernel(const __grid_constant__ TensorsOfLaunch<Rule> launch) {
  if (launch.call.found_inf.value() != 0) return;
  // Elements of a thread's access: 16 bytes of the widest of the types; a warp takes whole blocks.
  constexpr bool kCoded = std::is_same_v<State, Codes>;
  constexpr bool kNarrow = std::is_same_v<Param, BFloat16> && std::is_same_v<Grad, BFloat16>;
  constexpr int kCount = kCoded || kNarrow ? 8 : 4;
  const int index = tensor_of_block(launch.first_block, launch.count, blockIdx.x);
  const StepTypes& types = launch.call.types;
  const StepTensor<Rule::kStates>& tensor = launch.tensors[index];
  const Prepared<Rule> prepared = launch.prepared[index];
  const Parameter<Param> parameter(types, tensor.param, tensor.param_copy);
  const auto grads = Pointer<Grad>::to(tensor.grad, types.grad);
  const States<Rule, State, Grad> states(types, tensor, prepared.noise);
  constexpr int kStates = StatesOfLoop<Rule, Grad>::kCount;
  const int64_t begin = int64_t(int(blockIdx.x) - launch.first_block[index]) * kChunk;
  const int64_t end = ::min(begin + kChunk, tensor.n);

  const auto visit = [&]<Access access>(int64_t i, int count) {
    const auto g = load<access, kCount>(grads + i, count);
    auto p = parameter.template load<access, kCount>(i, count);
    Floats<kCount> values[Rule::kStates];
    states.template load<access>(i, count, values);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      float lanes[Rule::kStates];
#pragma unroll
      for (int j = 0; j < kStates; ++j) lanes[j] = values[j].lanes[k];
      update(prepared.step, g.lanes[k], p.lanes[k], lanes);
#pragma unroll
      for (int j = 0; j < kStates; ++j) values[j].lanes[k] = lanes[j];
    }
    parameter.template store<access>(i, p, count);
    states.template store<access>(i, count, values);
  };
  // What has to stay together: a thread's elements, or with codes those of a warp, which finds the
  // scale of its block together, so that all its threads go on while one of them has elements.
  const int64_t offset = kCoded ? threadIdx.x % 32 * kCount : 0;
  constexpr int64_t kTogether = kCoded ? kCodesBlock : kCount;
  constexpr int64_t kStride = kThreads * kCount;
  int64_t i = begin + int64_t(threadIdx.x) * kCount;
  if (is_aligned<kCount>(types, tensor)) {
#pragma unroll 2  // twice the loads in flight: 7 % faster when all types have 16 bits
    for (; i - offset + kTogether <= end; i += kStride)
      visit.template operator()<Access::vector>(i, kCount);
  }
  for (; i - offset < end; i += kStride) {
    const int64_t left = end - i;
    visit.template operator()<Access::single>(i, int(left < 0 ? 0 : left < kCount ? left : kCount));
  }
}

template <class Rule>
void launch_advance_steps(const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
                          int64_t count, Prepared<Rule>* prepared, cudaStream_t stream) {
  StepsOfLaunch<Rule> launch;
  static_assert(sizeof(launch) <= kMaxKernelParameterBytes);
  launch.call = call;
  for (int64_t first = 0; first < count; first += kStepsPerLaunch) {
    launch.count = int(std::min<int64_t>(kStepsPerLaunch, count - first));
    launch.prepared = prepared + first;
    for (int i = 0; i < launch.count; ++i) {
      launch.steps[i] = tensors[first + i].step;
      launch.noise[i] = tensors[first + i].noise;
    }
    const int blocks = (launch.count + kThreads - 1) / kThreads;
    advance_steps<<<blocks, kThreads, 0, stream>>>(launch);
    check(cudaGetLastError(), Rule::kOp);
  }
}

template <class Rule, class Param, class Grad, class State>
void launch_step(const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
                 int64_t count, const Prepared<Rule>* prepared, cudaStream_t stream) {
  using Launch = TensorsOfLaunch<Rule>;
  Launch launch;
  static_assert(sizeof(launch) <= kMaxKernelParameterBytes);
  launch.call = call;
  for (int64_t first = 0; first < count; first += Launch::kMost) {
    launch.count = int(std::min<int64_t>(Launch::kMost, count - first));
    launch.prepared = prepared + first;
    int64_t blocks = 0;
    for (int i = 0; i < launch.count; ++i) {
      launch.tensors[i] = tensors[first + i];
      launch.first_block[i] = int(blocks);
      blocks += chunks_of(launch.tensors[i].n);
    }
    if (blocks == 0) continue;  // CUDA rejects an empty grid
    step_kernel<Rule, Param, Grad, State><<<unsigned(blocks), kThreads, 0, stream>>>(launch);
    check(cudaGetLastError(), Rule::kOp);
  }
}

// Queues the step of all tensors on the stream.
template <class Rule>
void queue_step(const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors, int64_t count,
                Prepared<Rule>* prepared, void* stream) {
  check(cudaPeekAtLastError(), Rule::kOp);  // of somebody before: nothing is modified yet
  launch_advance_steps(call, tensors, count, prepared, cudaStream_t(stream));
#define DSX_TRY_TYPES(Param, Grad, State)                                        \
  if (takes<Rule, Param, Grad, State>(call.types)) {                             \
    return launch_step<Rule, Param, Grad, State>(call, tensors, count, prepared, \
                                                 cudaStream_t(stream));          \
  }
  DSX_STEP_STORAGE_TYPES(DSX_TRY_TYPES)
#undef DSX_TRY_TYPES
}

}  // namespace cuda
}  // namespace dsx
