// By how much a pair is rotated, on CUDA.
#pragma once

#include "common/cuda/floats.cuh"
#include "attention/cache/rope.h"

namespace dsx {

#include "attention/cache/rope_math.inl"

namespace cuda {

// `radians` from one position to the next; whatever is rotated by infinitely many is NaN.
__device__ inline Rotation<Floats<1>> rotation_of(double radians, uint64_t position, float scale) {
  const bool finite = is_finite(radians);
  const Angle angle = angle_at(position, finite ? in_turns(radians) : 0);
  const float rest = finite ? angle.rest : float(radians - radians);
  return rotation(Floats<1>(rest), Floats<1>(angle.quarter_cos), Floats<1>(angle.quarter_sin),
                  scale);
}

}  // namespace cuda
}  // namespace dsx
