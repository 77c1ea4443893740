// What becomes of the sums of a matrix multiplication on few rows, for a SIMD register or for
// floats in CUDA.

// `sum` is that of a column, or of its gate, and `up` what it gates; both with their bias.
template <class V>
DSX_HOST_DEVICE inline V activated_sum(const FewRows& call, const V& sum, const V& up) {
  if (!call.activated) return sum;
  V value = sum;
  with_activation(call.activation,
                  [&](auto activation) { value = activation.at(sum, V(0.0f)).value; });
  return call.gated ? value * up : value;
}
