// The CUDA kernels of one elementwise op: of the rules that DSX_RULE_HEADER declares, of which
// DSX_FORMULA has the formulas; the row in op_builder/registry.py defines both. Where sums are
// wanted, a block takes a few columns of a group of rows, and adds them up over those; a small
// kernel then adds the groups.
#include DSX_RULE_HEADER

#include "common/cuda/add_partials.cuh"
#include "elementwise/row_list_cuda.cuh"
#include "elementwise/elementwise.h"

namespace dsx {

#include "common/activation_math.inl"
#include "common/noise_math.inl"
#include "common/dropout_math.inl"
#include "elementwise/elementwise_math.inl"
#include DSX_FORMULA

namespace {

using cuda::Floats;
using cuda::kCount;
using cuda::kThreads;
using cuda::kVectors;
using cuda::kWarp;
using cuda::Vector;
using cuda::VectorIndex;

// kCount elements of a mask, from number `first` on, as 1 or 0. Of rows of whole vectors none goes
// over a multiple of 2^32.
template <int kCount, bool kWhole>
__device__ inline Floats<kCount> kept_at(const DropoutMask& mask, int64_t first) {
  const Noise noise = noise_at(mask.noise, first);
  uint32_t bits[kCount];
  if (!mask.noise.on) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) bits[k] = UINT32_MAX;
  } else if (kWhole || uint32_t(first) <= UINT32_MAX - kCount) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) bits[k] = unrelated_bits(noise, uint32_t(k));
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) bits[k] = unrelated_bits(noise_at(mask.noise, first + k), 0u);
  }
  Floats<kCount> kept;
#pragma unroll
  for (int k = 0; k < kCount; ++k) kept.lanes[k] = bits[k] > mask.last_dropped ? 1.0f : 0.0f;
  return kept;
}

// What a thread has of all inputs, of one vector: as they lie, or as floats with a bias.
template <class Rule, class T>
struct Inputs {
  Vector<T> stored[Rule::kIn];
  Floats<kCount<T>> biased[Rule::kIn];

  __device__ void fetch(const Elementwise<Rule>& call, const VectorIndex& at, bool aligned) {
#pragma unroll
    for (int i = 0; i < Rule::kIn; ++i) {
      if (i == kKeptOf<Rule> || (is_optional<Rule>(i) && !call.in[i].is_present())) {
        stored[i] = {};
      } else {
        stored[i] = cuda::fetch_at<T>(call.in[i], at, aligned);
      }
    }
  }

  // `bias` has what belongs to these columns. Once, ahead of whatever formula is chosen.
  __device__ void add(const Elementwise<Rule>& call, const Floats<kCount<T>> (&bias)[Rule::kIn]) {
#pragma unroll
    for (int i = 0; i < Rule::kIn; ++i) {
      if (!Rule::is_biased(i)) continue;
      biased[i] = floats_of(stored[i]);
      if (call.bias[i].is_present()) biased[i] = biased[i] + bias[i];
    }
  }

  template <class Option>
  __device__ void evaluate(const Elementwise<Rule>& call, Option option, const VectorIndex& at,
                           const DropoutMask& mask, Floats<kCount<T>> (&out)[Rule::kOut]) const {
    Floats<kCount<T>> in[Rule::kIn];
#pragma unroll
    for (int i = 0; i < Rule::kIn; ++i) {
      in[i] = Rule::is_biased(i) ? biased[i] : floats_of(stored[i]);
    }
    if constexpr (kKeptOf<Rule> >= 0) {
      in[kKeptOf<Rule>] =
          kept_at<kCount<T>, !std::is_same_v<T, Any>>(mask, at.row * call.length + at.i);
    }
    formula(call.rule, option, in, out);
  }
};

// `count` elements of each bias, from number i on. They are in the cache after the first row.
template <class T, class Rule>
__device__ inline void fetch_biases(const Elementwise<Rule>& call, int64_t i, int count,
                                    bool aligned, Floats<kCount<T>> (&bias)[Rule::kIn]) {
#pragma unroll
  for (int k = 0; k < Rule::kIn; ++k) {
    if (!Rule::is_biased(k) || !call.bias[k].is_present()) continue;
    bias[k] = cuda::fetch<kCount<T>>(call.bias[k].template row<Any>(0), i, count, aligned).elements;
  }
}

template <class Rule, class T>
__device__ inline void put_all(const Elementwise<Rule>& call, const VectorIndex& at, bool aligned,
                               const Floats<kCount<T>> (&out)[Rule::kOut]) {
#pragma unroll
  for (int k = 0; k < Rule::kOut; ++k) {
    cuda::put<cuda::Stored::streamed>(cuda::row_of<T>(call.out[k], at.row), at.i, at.count, aligned,
                                      out[k]);
  }
}

template <class Rule>
constexpr int count_biased() {
  int count = 0;
  for (int i = 0; i < Rule::kIn; ++i) count += Rule::is_biased(i);
  return count;
}
template <class Rule>
constexpr int kBiased = count_biased<Rule>();

// with_option, with what is enough for results of 16 bits where they are.
template <class T, class Rule, class Body>
__device__ inline void with_option_for(const Elementwise<Rule>& call, const Body& body) {
  if constexpr (!kIsValueOf<Rule>) {
    with_option(call.rule, body);
  } else {
    with_option(call.rule, [&](auto option) {
      if constexpr (std::is_same_v<decltype(option), Gelu>) {
        if constexpr (std::is_same_v<T, Any>) {
          if (call.out[0].dtype == Dtype::bfloat16) return body(RoughGelu<BFloat16>{});
          if (call.out[0].dtype == Dtype::float16) return body(RoughGelu<Half>{});
        } else if constexpr (sizeof(T) == 2) {
          return body(RoughGelu<T>{});
        }
      }
      body(option);
    });
  }
}

// Fewer registers make more blocks, whose loads hide each other's wait; of biases, too. 0 leaves it
// to the compiler, and 1 would not: it would take more registers than it does alone.
template <class Rule, class T>
constexpr int blocks_of() {
  if (kBiased<Rule> == 0) return 0;
  if (kBiased<Rule> > 1) return 3;                    // with fewer registers it would spill
  if (kKeptOf<Rule> >= 0 && Rule::kIn > 2) return 4;  // likewise, for the bits of a mask
  if (std::is_same_v<T, float> && Rule::kIn == 1) return 6;
  return Rule::kIn > 1 && std::is_same_v<T, Any> ? 4 : 5;
}
template <class Rule, class T>
constexpr int kBlocks = blocks_of<Rule, T>();

template <class Rule, class T>
__global__ void __launch_bounds__(kThreads, (kBlocks<Rule, T>))
    elements_kernel(const __grid_constant__ Elementwise<Rule> call,
                    const __grid_constant__ cuda::ListLaunch list, bool aligned,
                    bool bias_aligned) {
  VectorIndex indices[kVectors];
  Inputs<Rule, T> inputs[kVectors];
  const cuda::ListPlace place(list, call.length, kCount<T>);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const VectorIndex& at = indices[k] = place.index(k, call.rows, call.length, kCount<T>);
    if (at.count > 0) inputs[k].fetch(call, at, aligned);
  }
  Floats<kCount<T>> bias[Rule::kIn];
  if constexpr (kBiased<Rule> > 0) {
    const VectorIndex& at = indices[0];  // in the row of each other vector as well
    if (at.count > 0) fetch_biases<T>(call, at.i, at.count, bias_aligned, bias);
  }
  const DropoutMask mask = mask_of(call.rule);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (kBiased<Rule> > 0 && indices[k].count > 0) inputs[k].add(call, bias);
  }
  with_option_for<T>(call, [&](auto option) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (indices[k].count == 0) continue;
      Floats<kCount<T>> out[Rule::kOut];
      inputs[k].evaluate(call, option, indices[k], mask, out);
      put_all<Rule, T>(call, indices[k], aligned, out);
    }
  });
}

// A warp takes neighbouring vectors of a row, each warp of a block another row: row by row those of
// the group, kWarps apart. Some are under way together, while those before them are worked on: more
// of them where an activation takes so many registers that few blocks are left.
constexpr int kWarps = kThreads / kWarp;
template <class Rule, class T>
constexpr int kAtATime = std::is_same_v<T, Any> ? 1
                         : kBiased<Rule> > 0    ? 4
                                                : 2;
template <class Rule, class T>
constexpr int kGroupBlocks = std::is_same_v<T, Any> || kBiased<Rule> > 0 ? 2 : 4;

// Depends on the number of rows alone, so sums are the same on any device. Those of groups of 128
// rows take 1 % of what 16 bits of two tensors take.
int rows_of_warp(int64_t rows) {
  return int(std::clamp<int64_t>(ceil_div(rows, kWarps * 64), 16, 32));
}

template <class Rule, class T>
__global__ void __launch_bounds__(kThreads, (kGroupBlocks<Rule, T>))
    groups_kernel(const __grid_constant__ Elementwise<Rule> call, int rows_of_warp, bool aligned,
                  bool bias_aligned) {
  constexpr int kColumns = kWarp * kCount<T>;  // of a block
  const int64_t strips = ceil_div(call.length, kColumns);
  const int64_t group = blockIdx.x / strips, first_column = blockIdx.x % strips * kColumns;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t i = first_column + lane * kCount<T>;
  const int64_t left = call.length - i;  // negative beyond the row
  const int count = int(::max(int64_t(0), ::min(left, int64_t(kCount<T>))));
  Floats<kCount<T>> sums[Rule::kOut];
  for (auto& sum : sums) sum = Floats<kCount<T>>(0.0f);
  const int64_t first_row = group * rows_of_warp * kWarps + warp;
  const int64_t rows_left = first_row < call.rows ? ceil_div(call.rows - first_row, kWarps) : 0;
  const int rows = count > 0 ? int(::min(rows_left, int64_t(rows_of_warp))) : 0;
  constexpr int kAt = kAtATime<Rule, T>;
  Inputs<Rule, T> inputs[kAt];
  const auto index = [&](int k) { return VectorIndex{first_row + k * kWarps, i, count}; };
  const auto fetch = [&](int first) {
#pragma unroll
    for (int k = 0; k < kAt; ++k) {
      if (first + k < rows) inputs[k].fetch(call, index(first + k), aligned);
    }
  };
  fetch(0);
  Floats<kCount<T>> bias[Rule::kIn];
  fetch_biases<T>(call, i, count, bias_aligned, bias);
  const DropoutMask mask = mask_of(call.rule);
  for (int first = 0; first < rows; first += kAt) {
    Inputs<Rule, T> there[kAt];
#pragma unroll
    for (int k = 0; k < kAt; ++k) there[k] = inputs[k];
    fetch(first + kAt);
    with_option(call.rule, [&](auto option) {
#pragma unroll
      for (int k = 0; k < kAt; ++k) {
        if (first + k >= rows) continue;
        Floats<kCount<T>> out[Rule::kOut];
        there[k].add(call, bias);
        there[k].evaluate(call, option, index(first + k), mask, out);
        if (kHasOut<Rule>) put_all<Rule, T>(call, index(first + k), aligned, out);
#pragma unroll
        for (int o = 0; o < Rule::kOut; ++o) sums[o] = sums[o] + out[o];
      }
    });
  }
  __shared__ float of_warps[Rule::kOut][kWarps][kColumns];
#pragma unroll
  for (int o = 0; o < Rule::kOut; ++o) {
#pragma unroll
    for (int k = 0; k < kCount<T>; ++k) {
      of_warps[o][warp][lane * kCount<T> + k] = sums[o].lanes[k];
    }
  }
  __syncthreads();
  const int64_t column = first_column + threadIdx.x;
  if (int(threadIdx.x) >= kColumns || column >= call.length) return;
#pragma unroll
  for (int o = 0; o < Rule::kOut; ++o) {
    if (!call.sums[o].is_present()) continue;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += of_warps[o][w][threadIdx.x];
    cuda::store<cuda::Access::single>(call.sums[o].template row<Any>(group) + column,
                                      Floats<1>(total), 1);
  }
}

}  // namespace

template <class Rule>
int64_t groups_cuda(int64_t rows) {
  return ceil_div(rows, kWarps * rows_of_warp(rows));
}

template <class Rule>
void elementwise_cuda(const Elementwise<Rule>& call, void* stream) {
  if (call.rows == 0 || call.length == 0) return;
  bool bias_aligned = true;
  for (const Rows& each : call.bias) bias_aligned &= cuda::all_aligned({each});
  std::vector<Rows> all;
  for (const Rows& each : call.in) {
    if (each.is_present()) all.push_back(each);
  }
  for (const Rows& each : call.out) {
    if (each.is_present()) all.push_back(each);
  }
  bool has_bias = false;
  for (const Rows& each : call.bias) has_bias |= each.is_present();
  cuda::launch_over_list(call.rows, call.length, all, has_bias, Rule::kOp,
                         [&](auto storage, const cuda::ListLaunch& launch, bool aligned) {
    using T = decltype(storage);
    if constexpr (kHasSums<Rule>) {
      if (call.has_sums()) {
        const int64_t strips = ceil_div(call.length, kWarp * kCount<T>);
        const unsigned blocks = unsigned(groups_cuda<Rule>(call.rows) * strips);
        groups_kernel<Rule, T><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(
            call, rows_of_warp(call.rows), aligned, bias_aligned);
        return;
      }
    }
    if constexpr (kHasOut<Rule>) {
      elements_kernel<Rule, T><<<launch.blocks, launch.threads, 0, cudaStream_t(stream)>>>(
          call, launch, aligned, bias_aligned);
    }
  });
}

template <class Rule>
void add_groups_cuda(const float* partials, int64_t groups, int64_t length, Rows target,
                     void* stream) {
  if (length == 0) return;
  cuda::PartialSums sums;
  sums.add(partials, target);
  cuda::add_partials(sums, groups, length, Rule::kOp, cudaStream_t(stream));
}

#define DSX_INSTANTIATE(Rule)                                      \
  template void elementwise_cuda(const Elementwise<Rule>&, void*); \
  template int64_t groups_cuda<Rule>(int64_t);                     \
  template void add_groups_cuda<Rule>(const float*, int64_t, int64_t, Rows, void*);
DSX_RULES(DSX_INSTANTIATE)

}  // namespace dsx
