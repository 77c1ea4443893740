// The formulas of gated activations, for a SIMD register or for floats in CUDA; the option is the
// struct of an activation. Shazeer, "GLU Variants Improve Transformer", 2020, equation 5.
template <class A, class V>
DSX_INLINE void formula(const GatedActivation&, A activation, const V (&in)[2], V (&out)[1]) {
  const auto& [gate, up] = in;
  out[0] = activation.at(gate, V(0.0f)).value * up;
}

template <class A, class V>
DSX_INLINE void formula(const GatedActivationBackward&, A activation, const V (&in)[3],
                        V (&out)[2]) {
  const auto& [gate, up, grad_out] = in;
  const Activated<V> activated = activation.at(gate, grad_out * up);
  out[0] = activated.grad;
  out[1] = grad_out * activated.value;
}
