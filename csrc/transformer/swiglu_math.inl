// The formulas of swiglu, for a SIMD register or for floats in CUDA. Shazeer, "GLU Variants Improve
// Transformer", 2020, equation 5.

template <class V>
DSX_HOST_DEVICE inline V gated(const V& gate, const V& up) {
  return gate * sigmoid(gate) * up;
}

template <class V>
struct GatedGrads {
  V gate, up;
};

// With s = sigmoid(gate), which has the derivative s (1 - s).
template <class V>
DSX_HOST_DEVICE inline GatedGrads<V> gated_grads(const V& grad, const V& gate, const V& up) {
  const V s = sigmoid(gate);
  const V silu = gate * s;
  return {grad * up * (s + silu * (V(1.0f) - s)), grad * silu};
}
