// Functions of Vec in terms of its other operations: the same bits in every ISA. The error bounds
// hold for all floats, which test_vec_math.cpp goes through; in units in the last place.

// 1.5 at most. Of 0 it is infinity, of a negative number NaN.
DSX_INLINE Vec rsqrt(Vec a) { return Vec(1.0f) / sqrt(a); }

// a as k ln 2 + r, of which r is up to half of ln 2, of either sign.
struct Reduced {
  Vec shifted;  // has k in its lowest bits
  Vec k, r;

  DSX_INLINE explicit Reduced(Vec a) {
    const Vec kToInteger = Vec(0x1.8p23f);  // added, it leaves the nearest integer
    shifted = multiply_add(a, Vec(1.44269504f), kToInteger);
    k = shifted - kToInteger;
    // ln 2 in two parts.
    r = multiply_add(k, Vec(2.12194440e-4f), multiply_add(k, Vec(-0.693359375f), a));
  }

  // e^r: the polynomial of Cephes' expf.
  DSX_INLINE Vec power() const {
    Vec p = Vec(1.9875691500e-4f);
    p = multiply_add(p, r, Vec(1.3981999507e-3f));
    p = multiply_add(p, r, Vec(8.3334519073e-3f));
    p = multiply_add(p, r, Vec(4.1665795894e-2f));
    p = multiply_add(p, r, Vec(1.6666665459e-1f));
    p = multiply_add(p, r, Vec(5.0000001201e-1f));
    p = multiply_add(p, r, Vec(1.0f));
    return multiply_add(p, r, Vec(1.0f));
  }
};

// 1.1 at most, also where the result is subnormal; 0 and infinity beyond.
DSX_INLINE Vec exp(Vec a) {
  // Whose results are 0 and infinity.
  const Reduced reduced(at_most(at_least(a, -105.0f), 90.0f));
  return times_power_of_2(reduced.power(), reduced.k);
}

// The same for numbers that are not above 0, in two thirds of the time: 1.1 at most, and 0 instead
// of what is below 2^-126.
DSX_INLINE Vec exp_of_negative(Vec a) {
  const Reduced reduced(a);
  const Vec power_of_2 = float_of(shift_left<23>(bits_of(reduced.shifted) + Ints(127u)));
  return select(a < Vec(-87.3365402f), Vec(0.0f), reduced.power() * power_of_2);
}

// 1 / (1 + e^-a), 2.6 at most; 0 instead of what is below 2^-126.
DSX_INLINE Vec sigmoid(Vec a) { return Vec(1.0f) / (Vec(1.0f) + exp(-a)); }

// 0.9 at most. Of 0 it is -infinity, of a negative number NaN. With a = 2^k m and m from sqrt(1/2)
// to sqrt(2), ln m is that of (1 + s) / (1 - s), a series in s; its coefficients are those of
// fdlibm's logf.
DSX_INLINE Vec log(Vec a) {
  const Mask small = a < Vec(0x1p-126f);  // subnormal, or out of the function's domain
  const Ints normal = bits_of(select(small, a * Vec(0x1p25f), a));
  const Ints kRootOfHalf(0x3f3504f3u), kOne(0x3f800000u);
  const Ints shifted = normal + (kOne - kRootOfHalf);
  const Vec m = float_of((shifted & Ints(0x7fffffu)) + kRootOfHalf);
  // The exponent, in the lowest bits of 1.5 * 2^23.
  const Vec biased = float_of(shift_right<23>(shifted) + Ints(0x4b400000u)) - Vec(0x1.8p23f);
  const Vec k = biased - select(small, Vec(127.0f + 25.0f), Vec(127.0f));
  const Vec f = m - Vec(1.0f);
  const Vec s = f / (Vec(2.0f) + f), z = s * s, w = z * z;
  const Vec odd = w * (Vec(0x1.999c26p-2f) + w * Vec(0x1.f13c4cp-3f));
  const Vec even = z * (Vec(0x1.555554p-1f) + w * Vec(0x1.23d3dcp-2f));
  const Vec half_square = Vec(0.5f) * f * f;
  const Vec low = s * (half_square + (even + odd)) + k * Vec(9.0580006145e-6f);
  const Vec result = k * Vec(0.69313812256f) - ((half_square - low) - f);
  const Vec infinity = float_of(Ints(0x7f800000u));
  const Vec positive = select(a < infinity, result, a);  // infinity and NaN are their own
  const Vec not_above = select(a == Vec(0.0f), -infinity, float_of(Ints(0x7fc00000u)));
  return select(a <= Vec(0.0f), not_above, positive);
}

// What special_functions.inl and formulas need besides, where CUDA has shorter ways.
DSX_INLINE Vec reciprocal(Vec a) { return Vec(1.0f) / a; }
DSX_INLINE Vec ratio(Vec a, Vec b) { return a / b; }
DSX_INLINE Vec bell(Vec a) { return exp(a * a * Vec(-0.5f)); }  // e^(-a^2 / 2)
DSX_INLINE Vec rough_sigmoid(Vec a) { return sigmoid(a); }
