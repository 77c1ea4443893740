// Sums over the lanes of a warp.
#pragma once

namespace dsx::cuda {

// Added up in a fixed order; every lane has the sum.
__device__ inline float sum_of_warp(float value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, distance);
  }
  return value;
}

}  // namespace dsx::cuda
