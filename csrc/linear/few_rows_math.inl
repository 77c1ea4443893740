// What becomes of the sums of a skinny GEMM, and what it does of the RMS norms around it, for a
// SIMD register or for floats in CUDA. The norm of h is h g / rms(h). The layer before it knows h,
// and rounds h g; the one after it knows all of a row, and divides its sums, which is the same as
// if it had divided what it multiplies.

// 1 / rms of a row of `length` elements. NaN where squares are too large for their sum, as of rows
// that are not finite.
template <class V>
DSX_HOST_DEVICE inline V inverse_rms_of_row(const V& sum_of_squares, int64_t length, float eps) {
  return inverse_rms(sum_of_squares, 1.0f / float(length), eps) + (sum_of_squares - sum_of_squares);
}

template <class V>
DSX_HOST_DEVICE inline V scaled_for_norm(const V& out, const V& weight, float weight_offset) {
  return out * (weight + V(weight_offset));
}

// `sum` is that of a column, or of its gate, and `up` what it gates; both with their bias.
template <class V>
DSX_HOST_DEVICE inline V activated_sum(const FewRows& call, const V& sum, const V& up) {
  if (!call.activated) return sum;
  V value = sum;
  with_activation(call.activation,
                  [&](auto activation) { value = activation.at(sum, V(0.0f)).value; });
  return call.gated ? value * up : value;
}
