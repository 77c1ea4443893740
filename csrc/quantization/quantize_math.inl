// The formulas of quantize and dequantize, element by element; formats.h says what they are for.
// Float and Ints are SIMD registers on the CPU, float and uint32_t in CUDA. The functions of a
// group are the same numbers on both.

// Between 2^23 and 2^24 floats have steps of 1: a sum near here is rounded to an integer, which is
// what its last bits are.
constexpr float kIntegers = 0x1.8p23f;

constexpr uint32_t kSignBit = 0x80000000, kInfinity = 0x7f800000;

// Magnitudes as integers: NaN is above infinity, and that above numbers, so the largest one does
// not depend on the order of comparisons.
template <class Ints>
DSX_INLINE Ints magnitude_of(Ints bits) {
  return bits & Ints(~kSignBit);
}

// The same of values with their sign: negative NaN, then -inf, numbers, inf and NaN.
template <class Ints>
DSX_INLINE Ints order_of(Ints bits) {
  return bits ^ ((Ints(0u) - shift_right<31>(bits)) | Ints(kSignBit));
}
DSX_HOST_DEVICE inline float value_of_order(uint32_t order) {
  return dsx::float_of(order & kSignBit ? order ^ kSignBit : ~order);
}

struct ScaleAndOffset {  // of a group, as in formats.h; no offset: -0, which changes no sum
  float scale, offset;
};

// x / y rounded once, of a y whose rounded reciprocal is known (Markstein, "Computation of
// elementary functions on the IBM RISC System/6000 processor", 1990, theorem 8.2): the rest is
// exact, unless the quotient is below 2^-126.
DSX_HOST_DEVICE inline float quotient_of(float x, float y, float reciprocal) {
  const float first = x * reciprocal;
  return dsx::multiply_add(dsx::multiply_add(-first, y, x), reciprocal, first);
}

// What the code of the largest element stands for, times the scale, and 1 / that, rounded.
struct LargestCode {
  float code, reciprocal;

  DSX_HOST_DEVICE constexpr LargestCode(QuantFormat format, bool asymmetric)
      : code(largest_code(format, asymmetric)), reciprocal(1.0f / code) {}
};

// Of a group whose largest magnitude has these bits.
DSX_HOST_DEVICE inline ScaleAndOffset symmetric_scale(uint32_t largest, const LargestCode& most) {
  if (largest >= kInfinity) return {dsx::float_of(0x7fc00000), -0.0f};
  const float magnitude = dsx::float_of(dsx::min(largest, dsx::bits_of(kMostScaled)));
  const float scale = quotient_of(magnitude, most.code, most.reciprocal);
  return {dsx::max(scale, kLeastScale), -0.0f};
}

// Of a group, by the largest of the orders of its elements and the largest of their complements.
// The difference of two finite numbers may be infinite, half of it is not.
DSX_HOST_DEVICE inline ScaleAndOffset asymmetric_scale(uint32_t largest, uint32_t least_flipped,
                                                       const LargestCode& most) {
  const uint32_t infinity = kSignBit | kInfinity;
  if (largest >= infinity || ~least_flipped <= ~infinity) return {dsx::float_of(0x7fc00000), 0};
  const float least = value_of_order(~least_flipped);
  const float half_range = 0.5f * dsx::min(value_of_order(largest), kMostScaled) - 0.5f * least;
  const float half = quotient_of(half_range, most.code, most.reciprocal);
  const float step = dsx::max(half, 0.5f * kLeastScale);
  return {step + step, least};
}

// What the elements of a group are rounded to. The position of an element is the element itself or,
// of a format with an offset, half of what it is above that.
struct Grid {
  float step, inverse;  // from one code to the next, as positions; 1 / step
  float half;           // the largest number that is no more than step / 2
  float half_offset;
  uint32_t mask;  // of codes: 0 for a group that is not finite
};

DSX_HOST_DEVICE inline Grid grid_of(const ScaleAndOffset& group, bool asymmetric) {
  Grid grid;
  grid.step = asymmetric ? 0.5f * group.scale : group.scale;  // exact: see asymmetric_scale
  grid.inverse = 1.0f / grid.step;
  const float half = 0.5f * grid.step;  // rounded, if it is below 2^-126
  grid.half = dsx::float_of(dsx::bits_of(half) - (half + half > grid.step ? 1 : 0));
  grid.half_offset = 0.5f * group.offset;
  grid.mask = group.scale == group.scale ? ~0u : 0;
  return grid;
}

template <class Float>
DSX_INLINE Float position_of(Float x, const Grid& grid, bool asymmetric) {
  return asymmetric ? multiply_add(x, Float(0.5f), Float(-grid.half_offset)) : x;
}

// How far a position is beyond a point of the grid: exact, if that is next to it.
template <class Float>
DSX_INLINE Float rest_of(Float position, Float number, const Grid& grid) {
  return multiply_add(number, Float(-grid.step), position);
}

// The sum of `integers` and the number of a point of the grid: the nearest one or, where that is
// further away than the threshold, the next one in the direction of the position. `integers` is
// kIntegers and what is added to numbers to make codes of them.
//
// With the threshold grid.half it is at most half a step away, exactly: the product is off by 2^-16
// of a step at most, so the first number is the nearest or a neighbour of it, and the rest, a
// multiple of the last bit of the step or of the position, has no more than 24 bits.
template <class Ints, class Float>
DSX_INLINE Float round_to_grid(Float position, const Grid& grid, Float threshold, float integers) {
  const Float first = multiply_add(position, Float(grid.inverse), Float(integers));
  const Float rest = rest_of(position, first - Float(integers), grid);
  const Float one = float_of(blend_bits(Ints(kSignBit), bits_of(rest), Ints(0x3f800000u)));
  return select(threshold < abs(rest), first + one, first);
}

// A threshold that is exceeded with a probability such that the expected value is exact to 2^-23 of
// a step: a random multiple of 2^-23 steps, and half of one. `random` has 32 bits.
template <class Float, class Ints>
DSX_INLINE Float random_threshold(const Grid& grid, Ints random) {
  const Float above_one = float_of(shift_right<9>(random) | Ints(0x3f800000u));
  return (above_one - Float(0x1.fffffep-1f)) * Float(grid.step);
}

// An 8-bit float: a sign, an exponent and a fraction.
template <int kFraction, int kBias, uint32_t kNotFinite>
struct Float8 {
  static constexpr int kCut = 23 - kFraction;  // of the fraction of a float
  static constexpr uint32_t kBiases = (127 - kBias) << 23;
  static constexpr uint32_t kLeastNormal = (128 - kBias) << 23;  // as a float
  // Adding this to a smaller number leaves a count of the least step in the last bits.
  static constexpr float kSteps = float(1 << (24 - kBias - kFraction));

  // Rounds a number to nearest, ties to even; it must not be beyond the largest one when rounded.
  template <class Ints, class Float>
  static DSX_INLINE Ints encode(Float value) {
    const Ints bits = bits_of(value), magnitude = magnitude_of(bits);
    const Ints odd = shift_right<kCut>(magnitude) & Ints(1u);
    const Ints rounded = magnitude + odd + Ints((1u << (kCut - 1)) - 1);
    const Ints normal = shift_right<kCut>(rounded - Ints(kBiases));
    const Ints steps = bits_of(float_of(magnitude) + Float(kSteps)) - bits_of(Float(kSteps));
    const auto small = float_of(magnitude) < Float(dsx::float_of(kLeastNormal));
    const Ints code = bits_of(select(small, float_of(steps), float_of(normal)));
    return code | (shift_right<24>(bits) & Ints(0x80u));
  }

  template <class Float, class Ints>
  static DSX_INLINE Float decode(Ints code) {
    const Ints magnitude = code & Ints(0x7fu);
    const Float normal = float_of(shift_left<kCut>(magnitude) + Ints(kBiases));
    const Float small = float_of(magnitude | bits_of(Float(kSteps))) - Float(kSteps);
    const Float number = select(normal < Float(dsx::float_of(kLeastNormal)), small, normal);
    const Float last = float_of(shift_left<kCut>(Ints(kNotFinite)) + Ints(kBiases));
    const Float infinite = float_of(bits_of(normal) | Ints(kInfinity));
    const Float value = select(normal < last, number, infinite);
    return float_of(bits_of(value) | shift_left<24>(code & Ints(0x80u)));
  }
};
using E4m3 = Float8<3, 7, 0x7f>;  // without infinity: 0x7f is NaN
using E5m2 = Float8<2, 15, 0x7c>;

// The nearest level of NF4, of a number from -1 to 1; halfway the lower one.
template <class Ints, class Float>
DSX_INLINE Ints encode_nf4(Float x) {
  const auto above = [&](const Float& threshold) DSX_INLINED { return threshold < x; };
  const auto middle = [](int i)
                          DSX_INLINED { return Float(0.5f * (nf4_level(i) + nf4_level(i + 1))); };
  const auto a = above(middle(7));
  const auto b = above(select(a, middle(11), middle(3)));
  const auto c =
      above(select(a, select(b, middle(13), middle(9)), select(b, middle(5), middle(1))));
  const Float upper =
      select(b, select(c, middle(14), middle(12)), select(c, middle(10), middle(8)));
  const Float lower = select(b, select(c, middle(6), middle(4)), select(c, middle(2), middle(0)));
  const auto d = above(select(a, upper, lower));
  const auto bit = [](auto mask, float value)
                       DSX_INLINED { return select(mask, Float(value), Float(0.0f)); };
  const Float code = bit(a, 8) + bit(b, 4) + bit(c, 2) + bit(d, 1);
  return bits_of(code + Float(kIntegers)) & Ints(15u);
}

template <class Float, class Ints>
DSX_INLINE Float decode_nf4(Ints code) {
  const auto bit = [&](uint32_t mask) DSX_INLINED {
    return Float(0.0f) < float_of(shift_left<27>(code & Ints(mask)));
  };
  const auto a = bit(8), b = bit(4), c = bit(2), d = bit(1);
  const auto two = [&](int i) DSX_INLINED {
    return select(d, Float(nf4_level(i + 1)), Float(nf4_level(i)));
  };
  const auto four = [&](int i) DSX_INLINED { return select(c, two(i + 2), two(i)); };
  const auto eight = [&](int i) DSX_INLINED { return select(b, four(i + 4), four(i)); };
  return select(a, eight(8), eight(0));
}

// The upper bits of a float whose last eight are a code: 2^23 and the code.
constexpr uint32_t kAboveCode = 0x4b000000;

// A code that is an integer, below that, as a number: what is above the code that stands for 0.
template <class Float, class Ints>
DSX_INLINE Float number_of_integer(Ints bits, float zero) {
  return float_of(bits) - Float(0x1p23f + zero);
}

// What a number stands for.
template <class Float>
DSX_INLINE Float scaled(Float number, const ScaleAndOffset& group) {
  return multiply_add(number, Float(group.scale), Float(group.offset));
}

// A format, as what makes a code of an element and a number of a code. Only integers have a random
// threshold.
template <bool kHasOffset>
struct IntegerCoding {
  static constexpr bool kIsInteger = true, kAsymmetric = kHasOffset, kMayBeNibbles = true;
  LargestCode most;
  float least;
  float zero;           // what is added to a number to make a code of 4 bits, which has no sign
  uint32_t flip;        // of the code as a byte, before it is read as a number without sign
  float unsigned_zero;  // what stands for 0 then

  DSX_HOST_DEVICE explicit IntegerCoding(QuantFormat format) : most(format, kAsymmetric) {
    const bool is_nibble = format == QuantFormat::int4;
    least = kAsymmetric ? 0 : -most.code;
    zero = is_nibble && !kAsymmetric ? 8 : 0;
    flip = is_nibble || kAsymmetric ? 0 : 0x80;
    unsigned_zero = is_nibble ? zero : float(flip);
  }

  DSX_HOST_DEVICE LargestCode largest() const { return most; }

  template <class Ints, class Float>
  DSX_INLINE Ints encode(Float x, const Grid& grid) const {
    return bits_of(round_to_grid<Ints>(position_of(x, grid, kAsymmetric), grid, Float(grid.half),
                                       kIntegers + zero));
  }

  // The next number may be beyond the last one, of which the largest element is off by rounding.
  template <class Ints, class Float>
  DSX_INLINE Ints encode(Float x, const Grid& grid, Ints random) const {
    const float integers = kIntegers + zero;
    const Float threshold = random_threshold<Float>(grid, random);
    const Float sum =
        round_to_grid<Ints>(position_of(x, grid, kAsymmetric), grid, threshold, integers);
    const Ints first = bits_of(Float(integers + least));
    return min(max(bits_of(sum), first), bits_of(Float(integers + most.code)));
  }

  // The number of what encode has returned, with all that is above the code.
  template <class Float, class Ints>
  DSX_INLINE Float number_of(Ints encoded) const {
    return float_of(encoded) - Float(kIntegers + zero);
  }

  template <class Float, class Ints>
  DSX_INLINE Float decode(Ints code) const {
    return number_of_integer<Float>((code ^ Ints(flip)) | Ints(kAboveCode), unsigned_zero);
  }
};

template <class Bits, QuantFormat kFormat>
struct Float8Coding {
  static constexpr bool kIsInteger = false, kAsymmetric = false, kMayBeNibbles = false;

  DSX_HOST_DEVICE static constexpr LargestCode largest() { return {kFormat, false}; }

  template <class Ints, class Float>
  DSX_INLINE Ints encode(Float x, const Grid& grid) const {
    return Bits::template encode<Ints>(x * Float(grid.inverse));
  }
  template <class Float, class Ints>
  DSX_INLINE Float decode(Ints code) const {
    return Bits::template decode<Float>(code);
  }
};

struct Nf4Coding {
  static constexpr bool kIsInteger = false, kAsymmetric = false, kMayBeNibbles = true;

  DSX_HOST_DEVICE static constexpr LargestCode largest() { return {QuantFormat::nf4, false}; }

  template <class Ints, class Float>
  DSX_INLINE Ints encode(Float x, const Grid& grid) const {
    return encode_nf4<Ints>(x * Float(grid.inverse));
  }
  template <class Float, class Ints>
  DSX_INLINE Float number_of(Ints encoded) const {
    return decode_nf4<Float>(encoded);
  }
  template <class Float, class Ints>
  DSX_INLINE Float decode(Ints code) const {
    return decode_nf4<Float>(code);
  }
};

// Of a group, by what it has been measured for.
template <class Coding>
DSX_HOST_DEVICE inline ScaleAndOffset scale_of(const Coding& coding, const Largest& found) {
  if constexpr (Coding::kAsymmetric) {
    return asymmetric_scale(found.magnitude_or_order, found.flipped, coding.largest());
  } else {
    return symmetric_scale(found.magnitude_or_order, coding.largest());
  }
}

// Calls body, which may be for the host alone, with the coding of a format.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class Body>
DSX_INLINE void with_coding(QuantFormat format, bool asymmetric, const Body& body) {
  switch (format) {
    case QuantFormat::int8:
    case QuantFormat::int4:
      return asymmetric ? body(IntegerCoding<true>(format)) : body(IntegerCoding<false>(format));
    case QuantFormat::nf4: return body(Nf4Coding());
    case QuantFormat::fp8_e4m3: return body(Float8Coding<E4m3, QuantFormat::fp8_e4m3>());
    case QuantFormat::fp8_e5m2: return body(Float8Coding<E5m2, QuantFormat::fp8_e5m2>());
  }
}

// The same for formats of packed weights, with the bits of a code, as a std::integral_constant.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class Body>
DSX_INLINE void with_packed_coding(QuantFormat format, bool asymmetric, const Body& body) {
  using Eight = std::integral_constant<int, 8>;
  using Four = std::integral_constant<int, 4>;
  switch (format) {
    case QuantFormat::int8:
      return asymmetric ? body(IntegerCoding<true>(format), Eight())
                        : body(IntegerCoding<false>(format), Eight());
    case QuantFormat::int4:
      return asymmetric ? body(IntegerCoding<true>(format), Four())
                        : body(IntegerCoding<false>(format), Four());
    case QuantFormat::nf4: return body(Nf4Coding(), Four());
    case QuantFormat::fp8_e4m3:
    case QuantFormat::fp8_e5m2: return;
  }
}
