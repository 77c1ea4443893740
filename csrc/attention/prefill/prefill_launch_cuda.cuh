// What launching the kernels of prefill_attention takes.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "attention/prefill/prefill.h"

namespace dsx::cuda {

constexpr const char* kPrefillName = "prefill_attention";

// By tensor cores, for queries of one type of 16 bits, over keys and values of the same or codes,
// that can be read 16 bytes at a time. Tells whether it was launched: not where shared memory has
// no memory for it.
template <class Query>
bool launch_prefill_mma(const PrefillAttention& call, cudaStream_t stream);
template <>
bool launch_prefill_mma<BFloat16>(const PrefillAttention& call, cudaStream_t stream);
template <>
bool launch_prefill_mma<Half>(const PrefillAttention& call, cudaStream_t stream);

// The same by groups of warps, where scores are scaled products and no more: not where the device
// is not of compute capability 9.0, heads have more than 128 elements, or the driver has no map of
// the cache.
template <class Query>
bool launch_prefill_warpgroups(const PrefillAttention& call, cudaStream_t stream);
template <>
bool launch_prefill_warpgroups<BFloat16>(const PrefillAttention& call, cudaStream_t stream);
template <>
bool launch_prefill_warpgroups<Half>(const PrefillAttention& call, cudaStream_t stream);

inline int attribute_of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), kPrefillName);
  check(cudaDeviceGetAttribute(&value, attribute, device), kPrefillName);
  return value;
}

// One for each strip of rows of a head of keys.
inline unsigned prefill_blocks(const PrefillAttention& call, int64_t rows_of_block) {
  const int64_t strips = ceil_div(call.rows(), rows_of_block);
  const int64_t blocks = strips * call.kv.heads * call.news.batches;
  if (blocks > INT32_MAX || call.rows() > INT32_MAX / 2) {
    throw std::runtime_error(std::string(kPrefillName) + ": q has " + std::to_string(blocks) +
                             " strips of tokens and heads, expected at most 2^31 - 1");
  }
  return unsigned(blocks);
}

}  // namespace dsx::cuda
