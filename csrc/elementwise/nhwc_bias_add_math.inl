// The formulas of nhwc_bias_add, for a SIMD register or for floats in CUDA.
template <class V>
DSX_INLINE void formula(const NhwcBiasAdd&, NoOption, const V (&in)[2], V (&out)[1]) {
  out[0] = in[0] + in[1];
}

template <class V>
DSX_INLINE void formula(const NhwcBiasAddAlone&, NoOption, const V (&in)[1], V (&out)[1]) {
  out[0] = in[0];
}

template <class V>
DSX_INLINE void formula(const NhwcBiasAddBackward&, NoOption, const V (&in)[1], V (&out)[1]) {
  out[0] = in[0];
}
