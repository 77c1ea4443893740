// Functions in terms of operations that Vec and CUDA's Floats both have, one formula for both. The
// polynomials are the best ones of their degree, in the relative error of the result. By how many
// units in the last place a result is off at most, for all floats:
//
//                                 Vec          CUDA
//   erf                           3            3
//   tanh                          5.2          7            and scaled_tanh, but for t's own error
//   normal's distribution at x    8 + x^2 / 2  10 + x^2  as x^2 is rounded before exp; CUDA makes
//   normal's density at x         2 + x^2 / 2  4 + x^2   0 of what is below 2^-126
//   small_sin, small_cos          1.5          2         up to pi / 4

// The value of a polynomial in x, whose coefficients begin with that of the highest power.
template <class V, class... Coefficients>
DSX_INLINE V polynomial(const V& x, float highest, Coefficients... others) {
  V value(highest);
  ((value = multiply_add(value, x, V(others))), ...);
  return value;
}

// e^(t^2 / 2) times the part of the normal distribution beyond t, of t >= 0: a smooth function, so
// that what it is multiplied with has all of the decline. Off by 8 x 2^-24 of it at most.
template <class V>
DSX_INLINE V scaled_normal_tail(const V& t) {
  const V q = reciprocal(multiply_add(t, V(0.35f), V(1.0f)));
  return q * polynomial(q, -0.029159496f, 0.14403889f, -0.2558558f, 0.15933926f, -0.023226133f,
                        0.10555848f, 0.11981973f, 0.13986373f, 0.13962129f);
}

// The normal distribution's function and density at x, for the price of one exp.
template <class V>
struct Normal {
  V distribution, density;
};
template <class V>
DSX_INLINE Normal<V> normal(const V& x) {
  const V e = bell(x);
  const V tail = e * scaled_normal_tail(abs(x));
  return {select(x < V(0.0f), tail, V(1.0f) - tail), e * V(0.39894228f)};
}

// The normal distribution's function at x for a result that is stored as T, of 16 bits, by one
// exponential and no quotient. log2 of the part beyond t = |x| is smooth, near -t^2 log2(e) / 2 -
// log2(t) - 1.3, and the polynomials are its best ones: for bfloat16 up to 13.4, where the part is
// 2^-134, off by 2^-10.7 of the part; for float16 up to 5.8, where x times it is less than half of
// the least number, off by 2^-18.2. They decline everywhere and go to -infinity. A unit in the last
// place is 2^-8 of a bfloat16 at least and 2^-11 of a float16: with the 0.5 that rounding takes, a
// result is off by 0.64 and 0.51 units at most, as a test shows for every x.
template <class T, class V>
DSX_INLINE V rough_normal(const V& x) {
  const V t = abs(x);
  V power;
  if constexpr (std::is_same_v<T, BFloat16>) {
    power = polynomial(t, -3.0342761e-7f, 1.7137099e-5f, -4.0725741e-4f, 5.365436e-3f,
                       -0.044037431f, -0.47365144f, -1.1424385f, -1.0008371f);
  } else {
    power = polynomial(t, -1.8287318e-6f, 6.1494909e-5f, -9.2984724e-4f, 8.5057383e-3f,
                       -0.053956654f, -0.45846689f, -1.1512504f, -0.99999535f);
  }
  const V tail = power_of_2(power);
  return select(x < V(0.0f), tail, V(1.0f) - tail);
}

// With the sign of `sign`, which may be a zero or NaN; a is not negative.
template <class V>
DSX_INLINE V with_sign_of(const V& sign, const V& a) {
  return select(sign < V(0.0f), -a, a);
}

template <class V>
DSX_INLINE V erf(const V& a) {
  const V magnitude = abs(a), square = a * a;
  const V small = a * polynomial(square, 7.853858e-5f, -8.0101925e-4f, 5.1883277e-3f, -0.026853811f,
                                 0.112835854f, -0.37612626f, 1.1283791f);
  const V tail = exp(-square) * scaled_normal_tail(magnitude * V(1.41421356f));
  return select(magnitude < V(1.0f), small, with_sign_of(a, V(1.0f) - (tail + tail)));
}

// bound * tanh(t), of a = bound * t: a times a quotient of polynomials that is 1 at 0, so that
// digits of a stay, however large the bound is. Beyond 9 the tangent is 1, in floats.
template <class V>
DSX_INLINE V scaled_tanh(const V& a, const V& t, float bound) {
  const V square = at_most(t * t, 82.0f);
  const V above = polynomial(square, 1.3242853e-8f, 2.0534113e-5f, 3.4912906e-3f, 0.133775f, 1.0f);
  const V below = polynomial(square, 7.7324597e-7f, 3.2784228e-4f, 0.025860915f, 0.46710816f, 1.0f);
  return at_least(at_most(a * ratio(above, below), bound), -bound);
}

template <class V>
DSX_INLINE V tanh(const V& a) {
  return scaled_tanh(a, a, 1.0f);
}

// Of angles up to pi / 4 in magnitude.
template <class V>
DSX_INLINE V small_sin(const V& a) {
  const V square = a * a;
  const V rest = polynomial(square, -1.9515217e-4f, 8.33216e-3f, -0.16666655f);
  return multiply_add(a * square, rest, a);
}
template <class V>
DSX_INLINE V small_cos(const V& a) {
  const V square = a * a;
  const V rest = polynomial(square, 2.443308e-5f, -1.3887315e-3f, 0.041666646f);
  return multiply_add(square * square, rest, V(1.0f) - square * V(0.5f));
}
