// The parts of Vec that follow from the others, in the same words for every ISA.

// Storage whose type is known at run time: a branch per vector, which always goes the same way.
inline Vec Vec::load(Pointer<Any> source, int count) {
  switch (source.dtype) {
    case Dtype::bfloat16: return load(static_cast<const BFloat16*>(source.address), count);
    case Dtype::float16: return load(static_cast<const Half*>(source.address), count);
    case Dtype::float32: return load(static_cast<const float*>(source.address), count);
  }
  __builtin_unreachable();
}

inline void Vec::store(Pointer<Any> target, int count) const {
  switch (target.dtype) {
    case Dtype::bfloat16: return store(static_cast<BFloat16*>(target.address), count);
    case Dtype::float16: return store(static_cast<Half*>(target.address), count);
    case Dtype::float32: return store(static_cast<float*>(target.address), count);
  }
}

inline Mask operator>(Vec a, Vec b) { return b < a; }
inline Mask operator>=(Vec a, Vec b) { return b <= a; }
inline Mask operator!=(Vec a, Vec b) { return !(a == b); }

inline Ints lower_16_bits(Ints a) { return a & Ints(0xffffu); }
inline Ints upper_16_bits(Ints a) { return shift_right<16>(a); }
inline Ints lower_half_to_middle(Ints a) { return bytes_to_middle<0>(a); }
inline Ints upper_half_to_middle(Ints a) { return bytes_to_middle<2>(a); }

template <class T>
inline Ints Ints::load_upper(const T* source, int count) {
  return shift_left<32 - 8 * sizeof(T)>(load(source, count));
}
template <class T>
inline void Ints::store_upper(T* target, int count) const {
  shift_right<32 - 8 * sizeof(T)>(*this).store(target, count);
}
