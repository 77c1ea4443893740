// decode_attention on CUDA for whatever is stored and however it lies: a block takes a chunk for a
// head of keys, row by row.
#pragma once

#include <cuda_fp8.h>

#include "common/cuda/chain.cuh"
#include "common/cuda/warp.cuh"
#include "attention/decode/decode_tasks_cuda.cuh"

namespace dsx::cuda {

// An element of keys or values as a float, without its scale.
template <class Kind>
__device__ inline float element_at(const void* elements, Dtype dtype, int64_t place) {
  if constexpr (std::is_same_v<Kind, Int8Kv>) {
    return float(static_cast<const int8_t*>(elements)[place]);
  } else if constexpr (std::is_same_v<Kind, Fp8Kv>) {
    const auto half =
        __nv_cvt_fp8_to_halfraw(static_cast<const __nv_fp8_storage_t*>(elements)[place], __NV_E4M3);
    return __half2float(__half(half));
  } else {
    switch (dtype) {
      case Dtype::bfloat16: return widen(static_cast<const BFloat16*>(elements)[place]);
      case Dtype::float16: return widen(static_cast<const Half*>(elements)[place]);
      case Dtype::float32: return static_cast<const float*>(elements)[place];
    }
    __builtin_unreachable();
  }
}

struct AnyShared {
  float q[kLargestWidth];
  float scores[kChunkTokens];
  float of_warps[kDecodeWarps];
  int64_t pages[kChunkPages];
  bool wrong;
};

// The largest, or the sum, over the threads of a block.
__device__ inline float largest_of_block(float value, AnyShared& shared) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value = larger(value, __shfl_xor_sync(0xffffffff, value, distance));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (float each : shared.of_warps) value = larger(value, each);
  return value;
}
__device__ inline float sum_of_block(float value, AnyShared& shared) {
  value = sum_of_warp(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (float each : shared.of_warps) value += each;
  return value;
}

// Says of a row that what it has found is not a number.
__device__ inline void spoil(const DecodeAttention& call, float* partial) {
  if (threadIdx.x > 0) return;
  Powers{-INFINITY, NAN}.store(partial + padded_width(call.kv.width), 1);
}

template <class Kind>
__device__ inline void attend_row(const DecodeAttention& call, const Task& task, int64_t row,
                                  AnyShared& shared, float* partial) {
  const PagedKv& kv = call.kv;
  const int64_t token = row / call.group, head = task.head * call.group + row % call.group;
  const int64_t first = task.chunk * kChunkTokens;
  Scoring scoring;
  scoring.read(call, head, task.position(token));
  const int begin = int(::max(scoring.begin - first, int64_t(0)));
  const int end = int(::min(scoring.end - first, int64_t(kChunkTokens)));
  const auto source = call.q.at<Any>(task.batch, token, head);
  for (int i = threadIdx.x; i < kv.width; i += kDecodeThreads) {
    shared.q[i] = load<Access::single, 1>(source + i, 1).lanes[0];
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int t = begin + warp; t < end; t += kDecodeWarps) {
    const int64_t page = shared.pages[t / kPageTokens];
    const int64_t place = kv.place(page, task.head, t % kPageTokens);
    float product = 0;
    for (int i = lane; i < kv.width; i += 32) {
      product = __fmaf_rn(shared.q[i], element_at<Kind>(kv.keys, kv.dtype, place + i), product);
    }
    product = sum_of_warp(product);
    float scale = 1;
    if constexpr (Kind::kQuantized) {
      scale = kv.key_scales[kv.scale_place(page, task.head, t % kPageTokens)];
    }
    if (lane == 0) shared.scores[t] = scoring.score(call, product * scale, int(first) + t);
  }
  __syncthreads();
  float largest = -INFINITY, sum = 0;
  for (int t = threadIdx.x; t < kChunkTokens; t += kDecodeThreads) {
    if (t >= begin && t < end) largest = larger(largest, shared.scores[t]);
  }
  largest = largest_of_block(largest, shared);
  const float shift = shift_of_largest(largest);
  for (int t = threadIdx.x; t < kChunkTokens; t += kDecodeThreads) {
    if (t < begin || t >= end) continue;
    float weight = ::expf(shared.scores[t] - shift);
    sum += weight;
    if constexpr (Kind::kQuantized) {
      const int64_t page = shared.pages[t / kPageTokens];
      weight *= kv.value_scales[kv.scale_place(page, task.head, t % kPageTokens)];
    }
    shared.scores[t] = weight;
  }
  sum = sum_of_block(sum, shared);  // and a barrier
  const int64_t padded = padded_width(kv.width);
  for (int i = threadIdx.x; i < kv.width; i += kDecodeThreads) {
    float value = 0;
    for (int t = begin; t < end; ++t) {
      const int64_t place = kv.place(shared.pages[t / kPageTokens], task.head, t % kPageTokens);
      value = __fmaf_rn(shared.scores[t], element_at<Kind>(kv.values, kv.dtype, place + i), value);
    }
    partial[i] = value;
  }
  if (threadIdx.x == 0) Powers{largest, sum}.store(partial + padded, 1);
  __syncthreads();
}

// Finds the pages that any row looks at.
__device__ inline void find_pages(const DecodeAttention& call, const Task& task,
                                  AnyShared& shared) {
  if (threadIdx.x == 0) {
    shared.wrong = false;
    const int64_t begin = task.seen_begin;
    for (int i = 0; i < kChunkPages; ++i) {
      const int64_t number = task.chunk * kChunkPages + i;
      const bool used = number * kPageTokens < task.length && (number + 1) * kPageTokens > begin;
      const int64_t page = used ? call.kv.page_of(task.slot, number) : 0;
      shared.wrong |= page < 0;
      shared.pages[i] = page < 0 ? 0 : page;
    }
  }
  __syncthreads();
}

template <class Kind>
__global__ void __launch_bounds__(kDecodeThreads)
    decode_any_kernel(const __grid_constant__ DecodeAttention call,
                      const __grid_constant__ Partials partials) {
  __shared__ AnyShared shared;
  wait_for_previous();
  let_next_begin();
  Tasks tasks(call);
  for (Task task = tasks.next(); task.there; task = tasks.next()) {
    find_pages(call, task, shared);
    for (int64_t row = 0; row < task.count * call.group; ++row) {
      float* partial = partials.at(task.batch, call.kv.heads, task.head, task.index, row);
      if (shared.wrong) {
        spoil(call, partial);
      } else {
        attend_row<Kind>(call, task, row, shared, partial);
      }
    }
    __syncthreads();  // the next task has other pages
  }
}

}  // namespace dsx::cuda
