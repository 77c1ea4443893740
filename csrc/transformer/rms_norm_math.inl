// The formulas of rms_norm, for a SIMD register or for floats in CUDA. Zhang & Sennrich, "Root Mean
// Square Layer Normalization", 2019, equation 4, with eps under the root as models have it.

// 1 / rms of a row of n elements.
template <class V>
DSX_HOST_DEVICE inline V inverse_rms(const V& sum_of_squares, float n, float eps) {
  return rsqrt(sum_of_squares / V(n) + V(eps));
}

template <class V>
DSX_HOST_DEVICE inline V normalized(const V& x, const V& inverse, const V& weight) {
  return x * inverse * weight;
}

// What the row's own rms takes from the gradient of each x, per x: `dot` is the sum over the row of
// x * grad_out * weight.
template <class V>
DSX_HOST_DEVICE inline V rms_share(const V& dot, const V& inverse, float n) {
  return dot / V(n) * inverse * inverse * inverse;
}

template <class V>
DSX_HOST_DEVICE inline V grad_of_x(const V& x, const V& weighted_grad, const V& inverse,
                                   const V& share) {
  return weighted_grad * inverse - x * share;
}

// Of one row; the gradient of the weight is the sum over all rows.
template <class V>
DSX_HOST_DEVICE inline V grad_of_weight(const V& x, const V& grad_out, const V& inverse) {
  return grad_out * (x * inverse);
}
