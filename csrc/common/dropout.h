// Which elements dropout keeps: a mask that is never stored, as a hash of a seed and an element's
// number says it, the same on every device and for every split. No torch: plain numbers.
#pragma once

#include <cmath>

#include "common/noise.h"

namespace dsx {

struct Dropout {
  const int64_t* seed;    // where the tensors are; null: everything is kept
  uint32_t last_dropped;  // of 32 random bits: an element goes if they are this or less
  float scale;            // of what is kept
};

// The rate is p rounded to a multiple of 2^-32, from 0 to 1.
inline Dropout make_dropout(double p, const int64_t* seed) {
  const uint64_t dropped = uint64_t(std::nearbyint(p * 0x1p32));  // of 2^32
  if (dropped == 0) return {nullptr, 0, 1.0f};
  return {seed, uint32_t(dropped - 1), p < 1 ? float(1 / (1 - p)) : 0.0f};
}

// The random bits of elements from this one on, as far as the next multiple of 2^32: each 2^32
// elements have bits of their own.
DSX_HOST_DEVICE inline Noise noise_at(const Noise& noise, int64_t element) {
  Noise there = noise_from(noise, element);
  there.mask ^= uint32_t(uint64_t(element) >> 32) * kWeyl;
  return there;
}

struct DropoutMask {  // of one call; the seed is read here
  Noise noise;
  uint32_t last_dropped;

  DropoutMask() = default;
  DSX_HOST_DEVICE explicit DropoutMask(const Dropout& dropout)
      : noise{0, 0, dropout.seed != nullptr}, last_dropped(dropout.last_dropped) {
    if (noise.on) noise = make_noise({uint64_t(*dropout.seed), 0, true}, 0);
  }
};

}  // namespace dsx
