// The formulas of both norms, for a SIMD register or for floats in CUDA. Zhang & Sennrich, "Root
// Mean Square Layer Normalization", 2019, equation 4, and Ba, Kiros & Hinton, "Layer
// Normalization", 2016, equation 4, with eps under the root as models have it. What is divided by
// the root is x, or in layer normalization how far x is from the mean: its deviation.

// The mean of a row is a float, which alone would be off by 2^-24 of itself, more than small
// deviations from a large mean can bear; and what the deviations from that float have for a mean.
// Chan, Golub & LeVeque, "Algorithms for computing the sample variance", 1983, equation 1.7.
template <class V>
DSX_HOST_DEVICE inline V deviation(const V& x, const V& mean, const V& rest) {
  return x - mean - rest;
}

// Sums over a row around some number near its values: of their squares, themselves, and with
// gradients of the products with those, and of those. One pass over the row is enough for them.
struct NormSums {
  float squares = 0, values = 0, dot = 0, grads = 0;

  // The sum of squared deviations from the mean. Of n elements, 1 / n is given here and below.
  DSX_HOST_DEVICE float squared_deviations(float inverse_n) const {
    const float rounded = squares - values * (values * inverse_n);
    return rounded < 0 ? 0 : rounded;
  }
  // Whether that number is so far from the mean that too little is left of the squares, or so far
  // from the values that squares are too large to tell: then the sums are taken once more, around
  // the mean.
  DSX_HOST_DEVICE bool are_far(float inverse_n) const {
    const float around = squared_deviations(inverse_n);
    return !(values * (values * inverse_n) <= 4 * around && around <= 0x1.fffffep127f);
  }
};

// The mean of a row as a float and what that lacks: Knuth, TAOCP 2, 4.2.2, theorem B.
struct RowMean {
  float mean, rest;

  DSX_HOST_DEVICE RowMean(float near, float shift) : mean(near + shift) {
    const float moved = mean - near;
    rest = (near - (mean - moved)) + (shift - moved);
  }
};

// Whether squares could be added up in floats: too large ones are inf, and of tiny ones so much is
// lost that it shows if eps does not hide it. If not, everything is multiplied by a power of 2
// before it is squared, and eps by its square.
DSX_HOST_DEVICE inline bool squares_fit(float inverse) { return inverse > 0 && inverse < 0x1p60f; }
DSX_HOST_DEVICE inline float scale_of_squares(float inverse) {
  return inverse > 0 ? 0x1p80f : 0x1p-80f;
}

// The deviation over the rms, in layer normalization from `mean` and -rest * inverse.
template <class V>
DSX_HOST_DEVICE inline V standardized(const V& x, const V& inverse) {
  return x * inverse;
}
template <class V>
DSX_HOST_DEVICE inline V standardized(const V& x, const V& inverse, const V& mean,
                                      const V& scaled_rest) {
  return multiply_add(x - mean, inverse, scaled_rest);
}

template <class V>
DSX_HOST_DEVICE inline V normalized(const V& standard, const V& weight) {
  return standard * weight;
}
template <class V>
DSX_HOST_DEVICE inline V normalized(const V& standard, const V& weight, const V& bias) {
  return multiply_add(standard, weight, bias);
}

// What the row's own rms takes from the gradient of each x, per standardized x: `dot` is the sum
// over the row of deviation * grad_out * weight.
template <class V>
DSX_HOST_DEVICE inline V rms_share(const V& dot, const V& inverse, float inverse_n) {
  return dot * V(inverse_n) * inverse * inverse;
}

template <class V>
DSX_HOST_DEVICE inline V grad_of_x(const V& standard, const V& weighted_grad, const V& inverse,
                                   const V& share) {
  return multiply_add(weighted_grad, inverse, -(standard * share));
}
// In layer normalization the mean over the row is taken from weighted_grad: `shift` is that mean
// times `inverse`.
template <class V>
DSX_HOST_DEVICE inline V grad_of_x(const V& standard, const V& weighted_grad, const V& inverse,
                                   const V& share, const V& shift) {
  return multiply_add(weighted_grad, inverse, -multiply_add(standard, share, shift));
}

// The gradient of the weight over some rows, with that of one more.
template <class V>
DSX_HOST_DEVICE inline V add_grad_of_weight(const V& standard, const V& grad_out, const V& before) {
  return multiply_add(grad_out, standard, before);
}
