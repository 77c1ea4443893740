// Heads that are rotated eight pairs at a time, which a thread has in two vectors: the first of
// each pair and the second ones, or, of interleaved pairs, four in each.
#pragma once

#include "common/cuda/rows.cuh"
#include "attention/cache/rope_angle_cuda.cuh"

namespace dsx::cuda {

using RowFloats = Floats<kRowVector>;

// Whether all vectors of these heads may be accessed 16 bytes at a time.
inline bool is_aligned(const Heads& heads) {
  const uint64_t bytes = uint64_t(bytes_of(heads.dtype));
  const uint64_t distances = uint64_t(heads.of_batch | heads.of_token | heads.of_head);
  return (uint64_t(reinterpret_cast<uintptr_t>(heads.data)) | distances * bytes) % 16 == 0;
}

}  // namespace dsx::cuda
