// What launching the kernels of block_sparse_attention by tensor cores takes.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda/check.h"
#include "common/cuda/device.cuh"
#include "attention/sparse/block_sparse_tasks_cuda.cuh"

namespace dsx::cuda {

// For one type of 16 bits of q, k, v and the rest, that can be read 16 bytes at a time, and heads
// of up to 128 elements. False: shared memory has no room; nothing was launched.
template <class T>
bool launch_attend(const SparseTask& task, const Device& device, cudaStream_t stream);
template <class T>
bool launch_backward_rows(const SparseTask& task, const Device& device, cudaStream_t stream);
template <class T>
bool launch_backward_columns(const SparseTask& task, const Device& device, cudaStream_t stream);

#define DSX_DECLARE(T)                                                          \
  template <>                                                                   \
  bool launch_attend<T>(const SparseTask&, const Device&, cudaStream_t);        \
  template <>                                                                   \
  bool launch_backward_rows<T>(const SparseTask&, const Device&, cudaStream_t); \
  template <>                                                                   \
  bool launch_backward_columns<T>(const SparseTask&, const Device&, cudaStream_t)
DSX_DECLARE(BFloat16);
DSX_DECLARE(Half);
#undef DSX_DECLARE

}  // namespace dsx::cuda
