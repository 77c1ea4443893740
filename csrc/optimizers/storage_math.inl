// The storage formats of optimizer state, element by element: stochastic rounding, a float in two
// halves, 8-bit codes. Float and Ints are SIMD registers on the CPU, float and uint32_t in CUDA.

// The 16 random bits for state tensor j of an element: one hash serves two tensors.
template <class Ints>
DSX_HOST_DEVICE inline Ints half_of(Ints random, int j) {
  return j % 2 == 0 ? lower_16_bits(random) : upper_16_bits(random);
}

// The same 16 bits in the middle of each element.
template <class Ints>
DSX_HOST_DEVICE inline Ints half_in_middle(Ints random, int j) {
  return j % 2 == 0 ? lower_half_to_middle(random) : upper_half_to_middle(random);
}

constexpr uint32_t kNearest = 0x80008000;  // in the place of random bits: rounds to the nearest

// The BFloat16 above or below, with a probability such that the expected value is exact. `random`
// has 16 bits.
template <class Float, class Ints>
DSX_HOST_DEVICE inline Float round_to_bfloat16(Float value, Ints random) {
  const Float rounded = float_of((bits_of(value) + random) & Ints(0xffff0000u));
  return select(value == value, rounded, value);  // the carry must not turn NaN into a number
}

// A float in two halves: the upper one is its BFloat16, rounded half up; the lower one, an int16_t,
// is what has to be added to get all 32 bits back.
// A zero that somebody has written over the upper half stands for itself: with a negative lower
// half the sum would be NaN, which no other number becomes.
template <class Float, class Ints>
DSX_HOST_DEVICE inline Float join_halves(Float rounded, Ints lower) {
  const Float joined = float_of(bits_of(rounded) + lower);
  return select(joined == joined, joined, rounded);
}

template <class Ints>
DSX_HOST_DEVICE inline Ints round_half_up(Ints bits) {  // the upper half: the first 16 bits of it
  return bits + Ints(0x8000u);
}

// The bits of a value for splitting: every NaN becomes one whose upper half is NaN too.
template <class Ints, class Float>
DSX_HOST_DEVICE inline Ints bits_to_split(Float value) {
  return bits_of(select(value == value, value, Float(float_of(Ints(0x7fc00000u)))));
}

// 8-bit codes. The elements of a block are divided by a power of two that brings them below 2, and
// a floor is added. The last bits of the exponent and four fraction bits of the sum are the code:
// near zero equal steps, further up steps of 1/16 to 1/32 of the value, with no table and no
// branch. Signed values: a sign bit and 7 bits, for 8 binades. Others: 8 bits, for 16 binades, and
// never code 0: a second moment must not vanish by rounding.
constexpr int kCutBits = 19;                     // of the fraction, which the code leaves out
constexpr uint32_t kSignedFloor = 0x3c000000;    // bits of 2^-7; the code comes from bits above 19
constexpr uint32_t kUnsignedFloor = 0x38000000;  // bits of 2^-15
constexpr uint32_t kSign = 0x80000000;

// The scale of a block whose largest magnitude has these bits: the least power of two that leaves
// no code cut off. NaN if that magnitude is not a number or beyond 2^125.
DSX_HOST_DEVICE inline float scale_of_block(uint32_t largest) {
  if (largest == 0) return 0;
  if (largest >= 0x7e000000) return dsx::float_of(0x7fc00000);
  const uint32_t exponent = dsx::bits_of(dsx::float_of(largest) * 1.04f) >> 23;
  return dsx::float_of((exponent == 0 ? 1 : exponent) << 23);
}

// 1 / scale, exactly; of 0 anything.
DSX_HOST_DEVICE inline float inverse_of_scale(float scale) {
  return dsx::float_of((254u << 23) - dsx::bits_of(scale));
}

// The value of a code, of which `above_floor` is the sum, as bits, and `sign` has the sign bit.
template <class Float, class Ints>
DSX_HOST_DEVICE inline Float decode_sum(Ints above_floor, Ints sign, float scale, bool is_signed) {
  const float floor = dsx::float_of(is_signed ? kSignedFloor : kUnsignedFloor) * scale;
  const Float value = scale_and_add(float_of(above_floor), Float(scale), Float(-floor));
  return is_signed ? float_of(bits_of(value) | (sign & Ints(kSign))) : value;
}

// `code` is in the upper 8 bits, with zeros below.
template <class Float, class Ints>
DSX_HOST_DEVICE inline Float decode(Ints code, float scale, bool is_signed) {
  const Ints bits = shift_right<24 - kCutBits>(code);
  const Ints above_floor = is_signed ? blend_bits(Ints(0x7fu << kCutBits), bits, Ints(kSignedFloor))
                                     : bits | Ints(kUnsignedFloor);
  return decode_sum<Float>(above_floor, code, scale, is_signed);
}

// The upper 8 bits of the result are the code, as no carry leaves them: the sum is below 2.
// `random` has 16 bits in its middle; the expected value is exact, but for unsigned ones below the
// first step, which become the first step.
template <class Float, class Ints>
DSX_HOST_DEVICE inline Ints encode(Float value, float inverse_scale, Ints random, bool is_signed) {
  constexpr int kUp = 24 - kCutBits;
  const Float inverse(inverse_scale);
  if (!is_signed) {
    const Float sum = scale_and_add(value, inverse, float_of(Ints(kUnsignedFloor)));
    return max(shift_left<kUp>(bits_of(sum)) + random, Ints(1u << 24));
  }
  const Ints floor = blend_bits(Ints(kSign), bits_of(value), Ints(kSignedFloor));
  const Float sum = scale_and_add(value, inverse, float_of(floor));
  return blend_bits(Ints(kSign), bits_of(value), shift_left<kUp>(bits_of(sum)) + random);
}
