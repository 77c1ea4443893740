// The root mean square of a row, for a SIMD register or for floats in CUDA.

// 1 / rms of a row, of whose length 1 / n is given.
template <class V>
DSX_HOST_DEVICE inline V inverse_rms(const V& sum_of_squares, float inverse_n, float eps) {
  return rsqrt(sum_of_squares * V(inverse_n) + V(eps));
}
