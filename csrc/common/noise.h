// Random bits for stochastic rounding, without a generator: a hash of a key, the step and the index
// of the element. The same bits on every device, however a tensor is split.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace dsx {

struct NoiseKey {  // of one parameter, for all steps
  uint64_t key;
  int64_t first_index;  // of the parameter's first element here in the whole parameter
  bool on;              // false: state is rounded to the nearest
};

struct Noise {  // of one parameter in one step
  uint32_t offset, mask;
  bool on;
};

// An odd number near 2^32 / golden ratio: multiples of it spread evenly over 32 bits.
constexpr uint32_t kWeyl = 0x9e3779b9;

// The finalizer of SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number
// generators", 2014). Elements 2^32 apart in a parameter share their bits.
DSX_HOST_DEVICE inline Noise make_noise(const NoiseKey& key, float step) {
  uint64_t x = key.key + uint64_t(step) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  x ^= x >> 31;
  return {uint32_t(x) + uint32_t(key.first_index) * kWeyl, uint32_t(x >> 32), key.on};
}

// The same for elements that are counted from `first` on.
DSX_HOST_DEVICE inline Noise noise_from(const Noise& noise, int64_t first) {
  return {noise.offset + uint32_t(first) * kWeyl, noise.mask, noise.on};
}

}  // namespace dsx
