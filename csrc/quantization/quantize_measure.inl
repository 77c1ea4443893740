// What groups are measured for, in SIMD registers, and where their scales are.
#include "quantization/quantize_math.inl"

// 0, 1, 2 ...
DSX_INLINE Vec lane_numbers() { return float_of(Ints::from(0) | Ints(0x4b000000u)) - Vec(0x1p23f); }

template <class T>
DSX_INLINE void measure(const T* x, int64_t count, bool asymmetric, Largest& found) {
  Ints largest(0u), flipped(0u);
  if (asymmetric) {
    const Vec first(to_float(*x));  // in the place of what is behind the end
    for_each_vector(0, count, [&](int64_t i, int lanes) DSX_INLINED {
      Vec value = Vec::load(x + i, lanes);
      if (lanes < Vec::size) value = select(lane_numbers() < Vec(float(lanes)), value, first);
      const Ints order = order_of(bits_of(value));
      largest = max(largest, order);
      flipped = max(flipped, order ^ Ints(~0u));
    });
  } else {
    for_each_vector(0, count, [&](int64_t i, int lanes) DSX_INLINED {
      largest = max(largest, magnitude_of(bits_of(Vec::load(x + i, lanes))));
    });
  }
  found.magnitude_or_order = dsx::max(found.magnitude_or_order, max_of(largest));
  found.flipped = dsx::max(found.flipped, max_of(flipped));
}

DSX_INLINE void store_scale(const Groups& call, int64_t group, const ScaleAndOffset& scale) {
  if (call.scales != nullptr) call.scales[group] = scale.scale;
  if (call.offsets != nullptr) call.offsets[group] = scale.offset;
}

DSX_INLINE ScaleAndOffset stored_scale(const Groups& call, int64_t group) {
  return {call.scales[group], call.asymmetric ? call.offsets[group] : -0.0f};
}
