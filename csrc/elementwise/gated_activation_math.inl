// The formulas of gated activations, for a SIMD register or for floats in CUDA; A is the struct of
// an activation. Shazeer, "GLU Variants Improve Transformer", 2020, equation 5.

template <class A, class V>
DSX_INLINE V gated(const V& gate, const V& up) {
  return A::at(gate, V(0.0f)).value * up;
}

template <class V>
struct GatedGrads {
  V gate, up;
};

template <class A, class V>
DSX_INLINE GatedGrads<V> gated_grads(const V& grad, const V& gate, const V& up) {
  const Activated<V> activated = A::at(gate, grad * up);
  return {activated.grad, grad * activated.value};
}
