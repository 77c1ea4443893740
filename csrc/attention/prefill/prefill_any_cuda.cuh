// prefill_attention on CUDA for whatever is stored and however it lies, as floats: a block has 16
// rows of a head of keys, eight threads for each, and goes through the keys that they see by 16.
#pragma once

#include <cuda_fp8.h>

#include "attention/prefill/prefill_tasks_cuda.cuh"

namespace dsx::cuda {

constexpr int kAnyRows = 16, kAnyKeys = 16, kAnyThreads = 128, kRowThreads = 8;
static_assert(kAnyRows * kRowThreads == kAnyThreads && kPageTokens % kAnyKeys == 0);

struct PrefillAnyShared {
  float q[kAnyRows][kLargestWidth];
  float elements[kAnyKeys][kLargestWidth + 1];  // of keys, then of values
  float scores[kAnyRows][kAnyKeys + 1];         // then weights
};

// An element of keys or values as a float, without its scale.
template <class Kind>
__device__ inline float stored_element(const void* elements, Dtype dtype, int64_t place) {
  if constexpr (std::is_same_v<Kind, Int8Kv>) {
    return float(static_cast<const int8_t*>(elements)[place]);
  } else if constexpr (std::is_same_v<Kind, Fp8Kv>) {
    const auto code = static_cast<const __nv_fp8_storage_t*>(elements)[place];
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
  } else {
    const auto source = Pointer<Any>::to(const_cast<void*>(elements), dtype) + place;
    return load<Access::single, 1>(source, 1).lanes[0];
  }
}

// Reads the keys, or values, of tokens [begin, begin + kAnyKeys) of a page.
template <class Kind>
__device__ inline void read_elements(const PagedKv& kv, const void* elements, int64_t place,
                                     int there, PrefillAnyShared& shared) {
  const int width = int(kv.width);
  __syncthreads();
  for (int i = threadIdx.x; i < there * width; i += kAnyThreads) {
    const int token = i / width, k = i - token * width;
    shared.elements[token][k] =
        stored_element<Kind>(elements, kv.dtype, place + token * kv.of_token + k);
  }
  __syncthreads();
}

// What a row has found, by the eight threads that it has: each has every eighth element.
template <class Kind>
class RowOfThreads {
 public:
  __device__ RowOfThreads(const PrefillAttention& call, const StripOfRows& strip,
                          PrefillAnyShared& shared)
      : call_(call), shared_(shared), width_(int(call.kv.width)) {
    const int mine = strip.first_row + number();
    const int row = ::min(mine, strip.rows() - 1);
    scoring_ = RowScoring(call, strip.head_of(row), strip.position_of(row));
    if (mine >= strip.rows()) scoring_.position = -1;  // it sees nothing
    const auto source = call.q.at<Any>(strip.batch, strip.token_of(row), strip.head_of(row));
    for (int i = of_row(); i < width_; i += kRowThreads) {
      shared.q[number()][i] = load<Access::single, 1>(source + i, 1).lanes[0];
    }
  }

  // Makes products with keys from `first` on weights; scales are those of codes.
  __device__ void weigh(int first, const float* key_scales, const float* value_scales) {
    float scores[kAnyKeys / kRowThreads], largest = largest_;
#pragma unroll
    for (int i = 0; i < kAnyKeys / kRowThreads; ++i) {
      const int t = of_row() + i * kRowThreads;
      scores[i] = -INFINITY;
      if (!scoring_.sees(first + t)) continue;
      float product = 0;
      for (int k = 0; k < width_; ++k) {
        product = __fmaf_rn(shared_.q[number()][k], shared_.elements[t][k], product);
      }
      if constexpr (Kind::kQuantized) product *= key_scales[t];
      scores[i] = scoring_.score(call_, product, first + t);
      largest = ::fmaxf(largest, scores[i]);
    }
    for (int distance = 1; distance < kRowThreads; distance *= 2) {
      largest = ::fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    }
    const float shift = shift_of_largest(largest);
    rescale_ = ::expf(largest_ - shift);
    largest_ = largest;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kAnyKeys / kRowThreads; ++i) {
      const int t = of_row() + i * kRowThreads;
      float weight = ::expf(scores[i] - shift);
      sum += weight;
      if constexpr (Kind::kQuantized) {
        if (scoring_.sees(first + t)) weight *= value_scales[t];
      }
      shared_.scores[number()][t] = weight;
    }
    sum_ = __fmaf_rn(sum_, rescale_, sum);
    __syncwarp();
  }

  __device__ void add_values(int first) {
    const int begin = ::max(scoring_.begin - first, 0);
    const int end = ::min(scoring_.position + 1 - first, kAnyKeys);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int k = of_row() + i * kRowThreads;
      if (k >= width_) break;
      out_[i] *= rescale_;
      for (int t = begin; t < end; ++t) {
        out_[i] = __fmaf_rn(shared_.scores[number()][t], shared_.elements[t][k], out_[i]);
      }
    }
  }

  __device__ void store_results(const StripOfRows& strip) {
    float sum = sum_;
    for (int distance = 1; distance < kRowThreads; distance *= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    const int row = strip.first_row + number();
    if (row >= strip.rows()) return;
    const EndOfRow end(call_, strip.head_of(row), largest_, sum);
    const int64_t index = strip.index_of(call_, row);
    const auto out = Pointer<Any>::to(call_.out, call_.q.dtype) + index * width_;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int k = of_row() + i * kRowThreads;
      if (k < width_) store<Access::single>(out + k, Floats<1>(out_[i] * end.factor), 1);
    }
    if (of_row() == 0) call_.lse[index] = end.lse;
  }

 private:
  static constexpr int kElements = kLargestWidth / kRowThreads;

  __device__ static int number() { return threadIdx.x / kRowThreads; }
  __device__ static int of_row() { return threadIdx.x % kRowThreads; }

  const PrefillAttention& call_;
  PrefillAnyShared& shared_;
  int width_;
  RowScoring scoring_;
  float largest_ = -INFINITY, sum_ = 0, rescale_ = 0;
  float out_[kElements] = {};
};

template <class Kind>
__global__ void __launch_bounds__(kAnyThreads)
    prefill_any_kernel(const __grid_constant__ PrefillAttention call) {
  __shared__ PrefillAnyShared shared;
  const StripOfRows strip(call, blockIdx.x, kAnyRows);
  const bool wrong = strip.wrong || lacks_pages(call, strip);
  const int rows = ::min(strip.rows() - strip.first_row, kAnyRows);
  if (wrong || rows < kAnyRows) store_the_rest(call, strip, kAnyRows, wrong);
  if (wrong || rows <= 0) return;
  const PagedKv& kv = call.kv;
  const int64_t begin = seen_at(strip.position_of(strip.first_row), call.window).begin;
  const int last = strip.position_of(strip.first_row + rows - 1);
  RowOfThreads<Kind> row(call, strip, shared);
  for (int first = int(begin / kAnyKeys) * kAnyKeys; first <= last; first += kAnyKeys) {
    const int64_t page = kv.page_of(strip.slot, first / kPageTokens);
    const int in_page = first % kPageTokens, there = ::min(last + 1 - first, kAnyKeys);
    const int64_t place = kv.place(page, strip.head, in_page);
    const float *key_scales = nullptr, *value_scales = nullptr;
    if constexpr (Kind::kQuantized) {
      const int64_t of_scales = kv.scale_place(page, strip.head, in_page);
      key_scales = kv.key_scales + of_scales;
      value_scales = kv.value_scales + of_scales;
    }
    read_elements<Kind>(kv, kv.keys, place, there, shared);
    row.weigh(first, key_scales, value_scales);
    read_elements<Kind>(kv, kv.values, place, there, shared);
    row.add_values(first);
  }
  row.store_results(strip);
}

}  // namespace dsx::cuda
