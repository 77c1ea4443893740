// The formulas of dropout, for a SIMD register or for floats in CUDA; `kept` is 1 or 0. What is
// dropped gives 0 whatever it is, NaN too. Srivastava et al., "Dropout", 2014, scaled in training.
template <class V>
DSX_INLINE V kept_or_zero(const V& kept, const V& value) {
  return select(kept < V(0.5f), V(0.0f), value);
}

template <class V>
DSX_INLINE void formula(const BiasDropoutResidual& rule, NoOption, const V (&in)[3], V (&out)[1]) {
  const auto& [x, kept, residual] = in;
  out[0] = kept_or_zero(kept, x * V(rule.dropout.scale)) + residual;
}

template <class V>
DSX_INLINE void formula(const BiasDropoutResidualBackward& rule, NoOption, const V (&in)[2],
                        V (&out)[1]) {
  const auto& [grad_out, kept] = in;
  out[0] = kept_or_zero(kept, grad_out * V(rule.dropout.scale));
}

template <class A, class V>
DSX_INLINE void formula(const DropoutActivation& rule, A activation, const V (&in)[2],
                        V (&out)[1]) {
  const auto& [x, kept] = in;
  out[0] = kept_or_zero(kept, activation.at(x, V(0.0f)).value * V(rule.dropout.scale));
}

template <class A, class V>
DSX_INLINE void formula(const DropoutActivationBackward& rule, A activation, const V (&in)[3],
                        V (&out)[1]) {
  const auto& [grad_out, x, kept] = in;
  out[0] = kept_or_zero(kept, activation.at(x, grad_out * V(rule.dropout.scale)).grad);
}
