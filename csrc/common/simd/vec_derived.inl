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

inline void Vec::store(Pointer<Any> target, int count, bool past_cache) const {
  switch (target.dtype) {
    case Dtype::bfloat16: return store(static_cast<BFloat16*>(target.address), count, past_cache);
    case Dtype::float16: return store(static_cast<Half*>(target.address), count, past_cache);
    case Dtype::float32: return store(static_cast<float*>(target.address), count, past_cache);
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

// These are templates so that an ISA that has an instruction for them can have a function, which
// is then chosen.

// a, or the bound if it is beyond that; NaN if a is NaN.
template <class V>
inline V at_least(V a, float least) {
  return select(a < V(least), V(least), a);
}
template <class V>
inline V at_most(V a, float most) {
  return select(V(most) < a, V(most), a);
}

// a * 2^k, rounded once, for an integer k from -300 to 254 and an a near 1; NaN if either is.
template <class V>
inline V times_power_of_2(V a, V k) {
  // In two factors, as k may be beyond the exponents of floats; 300 keeps everything positive.
  const Ints sum = bits_of(k + V(0x1.8p23f)) - Ints(0x4b400000u - 300u);
  const Ints half = shift_right<1>(sum);
  const Ints bias(150u - 127u);
  const V first = float_of(shift_left<23>(half - bias));
  const V second = float_of(shift_left<23>(sum - half - bias));
  return a * first * second;
}

// The sums of 16 lanes each, of which a Vec has all or some: lanes l and l + 8 first, then l and
// l + 4, and so on.
template <int kParts>
inline void store_lane_sums(const Vec (&a)[4][kParts], float* target) {  // [4]
  for (int i = 0; i < 4; ++i) {
    float lanes[kParts * Vec::size];
    for (int k = 0; k < kParts; ++k) a[i][k].store(lanes + k * Vec::size, Vec::size);
    for (int half = kParts * Vec::size / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    target[i] = lanes[0];
  }
}

// Adds each lane to a double of its own, or gives those, rounded: for sums of so many that floats
// would lose digits.
inline void add_to_doubles(const Vec& a, double* sums) {  // [Vec::size]
  float lanes[Vec::size];
  a.store(lanes, Vec::size);
  for (int k = 0; k < Vec::size; ++k) sums[k] += double(lanes[k]);
}
inline Vec rounded(const double* sums) {
  float lanes[Vec::size];
  for (int k = 0; k < Vec::size; ++k) lanes[k] = float(sums[k]);
  return Vec::load(lanes, Vec::size);
}

// The sums of four lanes each, modulo 2^32: lane 4 f + i has that of lanes 4 f to 4 f + 3 of a[i].
template <int kParts>
inline void sums_of_fours(const Ints (&a)[4][kParts], Ints (&sums)[kParts]) {
  uint32_t found[16];
  for (int i = 0; i < 4; ++i) {
    uint32_t lanes[16];
    memcpy(lanes, a[i], sizeof(lanes));
    for (int f = 0; f < 4; ++f) {
      found[4 * f + i] = lanes[4 * f] + lanes[4 * f + 1] + lanes[4 * f + 2] + lanes[4 * f + 3];
    }
  }
  memcpy(sums, found, sizeof(found));
}

// Lanes 4 f to 4 f + 3 of a[q] as lanes 4 q to 4 q + 3 of b[f].
template <int kParts>
inline void transpose_quarters(const Ints (&a)[4][kParts], Ints (&b)[4][kParts]) {
  constexpr int kOfQuarter = kParts / 4;  // of a quarter
  for (int f = 0; f < 4; ++f) {
    for (int q = 0; q < 4; ++q) {
      for (int p = 0; p < kOfQuarter; ++p) b[f][q * kOfQuarter + p] = a[q][f * kOfQuarter + p];
    }
  }
}
