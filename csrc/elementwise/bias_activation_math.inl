// The formulas of bias_activation, for a SIMD register or for floats in CUDA.
template <class A, class V>
DSX_INLINE void formula(const BiasActivation&, A activation, const V (&in)[1], V (&out)[1]) {
  out[0] = activation.at(in[0], V(0.0f)).value;
}

template <class A, class V>
DSX_INLINE void formula(const BiasActivationBackward&, A activation, const V (&in)[2],
                        V (&out)[1]) {
  const auto& [grad_out, x] = in;
  out[0] = activation.at(x, grad_out).grad;
}
