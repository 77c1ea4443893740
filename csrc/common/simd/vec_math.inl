// Functions of Vec in terms of its other operations: the same bits in every ISA. The error bounds
// hold for all floats, which test_vec_math.cpp goes through; in units in the last place.

// 1.5 at most. Of 0 it is infinity, of a negative number NaN.
inline Vec rsqrt(Vec a) { return Vec(1.0f) / sqrt(a); }

// 1.1 at most, also where the result is subnormal; 0 and infinity beyond. With a = k ln 2 + r, the
// result is 2^k e^r; the polynomial is that of Cephes' expf.
inline Vec exp(Vec a) {
  const Vec bounded = at_most(at_least(a, -105.0f), 90.0f);  // whose results are 0 and infinity
  const Vec kToInteger = Vec(0x1.8p23f);  // added, it leaves the nearest integer in the lowest bits
  const Vec shifted = bounded * Vec(1.44269504f) + kToInteger;
  const Vec k = shifted - kToInteger;
  // ln 2 in two parts, of which the first one times k is exact.
  const Vec r = scale_and_add(k, Vec(-0.693359375f), bounded) - k * Vec(-2.12194440e-4f);
  Vec p = Vec(1.9875691500e-4f);
  p = p * r + Vec(1.3981999507e-3f);
  p = p * r + Vec(8.3334519073e-3f);
  p = p * r + Vec(4.1665795894e-2f);
  p = p * r + Vec(1.6666665459e-1f);
  p = p * r + Vec(5.0000001201e-1f);
  p = p * (r * r) + r + Vec(1.0f);
  return times_power_of_2(p, k);
}

// 1 / (1 + e^-a), 2.6 at most; 0 instead of what is below 2^-126.
inline Vec sigmoid(Vec a) { return Vec(1.0f) / (Vec(1.0f) + exp(-a)); }

// What special_functions.inl and formulas need besides, where CUDA has shorter ways. multiply_add
// is rounded twice, as every ISA can.
inline Vec reciprocal(Vec a) { return Vec(1.0f) / a; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec bell(Vec a) { return exp(a * a * Vec(-0.5f)); }  // e^(-a^2 / 2)
inline Vec rough_sigmoid(Vec a) { return sigmoid(a); }
