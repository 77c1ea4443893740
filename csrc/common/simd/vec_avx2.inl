// Vec, Mask and Ints of 8 lanes for AVX2 with F16C.
struct Mask {
  __m256 lanes;  // all bits of a lane set: true; none: false

  Mask(__m256 value) : lanes(value) {}
};

struct Vec {
  static constexpr int size = 8;
  __m256 lanes;

  Vec() = default;
  Vec(float value) : lanes(_mm256_set1_ps(value)) {}
  Vec(__m256 value) : lanes(value) {}

  static Vec load(const float* source, int count) {
    if (count == size) return _mm256_loadu_ps(source);
    return _mm256_maskload_ps(source, first_lanes(count));
  }

  static Vec load(const BFloat16* source, int count) {
    const __m256i upper_half = _mm256_cvtepu16_epi32(load_16bit(source, count));
    return _mm256_castsi256_ps(_mm256_slli_epi32(upper_half, 16));
  }

  static Vec load(const Half* source, int count) {
    return _mm256_cvtph_ps(load_16bit(source, count));
  }

  void store(float* target, int count) const {
    if (count == size) return _mm256_storeu_ps(target, lanes);
    _mm256_maskstore_ps(target, first_lanes(count), lanes);
  }

  void store(BFloat16* target, int count) const {
    const __m256i bits = _mm256_castps_si256(lanes);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounding = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    store_16bit(target, count, _mm256_srli_epi32(_mm256_add_epi32(bits, rounding), 16));
  }

  void store(Half* target, int count) const {
    const __m128i rounded = _mm256_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT);
    store_16bit(target, count, _mm256_cvtepu16_epi32(rounded));
  }

  template <class T>
  static Vec load(Pointer<T> source, int count) {
    return load(source.address, count);
  }

  template <class T>
  void store(Pointer<T> target, int count) const {
    store(target.address, count);
  }

  static Vec load(Pointer<Any> source, int count);  // vec_derived.inl
  void store(Pointer<Any> target, int count) const;

 private:
  static __m256i first_lanes(int count) {
    const __m256i lane_index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane_index);
  }

  // AVX2 has no masked access to 16-bit elements, so a tail goes through a buffer of one register.
  template <class T>
  static __m128i load_16bit(const T* source, int count) {
    __m128i buffer = _mm_setzero_si128();
    memcpy(&buffer, source, count == size ? sizeof(buffer) : count * sizeof(T));
    return buffer;
  }

  // `narrowed` holds 16 bits in each 32-bit lane; lanes that are NaN are stored as T::kQuietNan.
  template <class T>
  void store_16bit(T* target, int count, __m256i narrowed) const {
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(lanes, lanes, _CMP_UNORD_Q));
    narrowed = _mm256_blendv_epi8(narrowed, _mm256_set1_epi32(T::kQuietNan), is_nan);
    const __m128i low = _mm256_castsi256_si128(narrowed);
    const __m128i high = _mm256_extracti128_si256(narrowed, 1);
    const __m128i packed = _mm_packus_epi32(low, high);
    memcpy(target, &packed, count == size ? sizeof(packed) : count * sizeof(T));
  }
};

inline Vec operator+(Vec a, Vec b) { return _mm256_add_ps(a.lanes, b.lanes); }
inline Vec operator-(Vec a, Vec b) { return _mm256_sub_ps(a.lanes, b.lanes); }
inline Vec operator*(Vec a, Vec b) { return _mm256_mul_ps(a.lanes, b.lanes); }
inline Vec operator/(Vec a, Vec b) { return _mm256_div_ps(a.lanes, b.lanes); }
inline Vec operator-(Vec a) { return _mm256_xor_ps(a.lanes, _mm256_set1_ps(-0.0f)); }
inline Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.lanes); }
inline Vec sqrt(Vec a) { return _mm256_sqrt_ps(a.lanes); }
inline Vec floor(Vec a) { return _mm256_floor_ps(a.lanes); }
inline Vec round_even(Vec a) {
  return _mm256_round_ps(a.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Mask operator<(Vec a, Vec b) { return _mm256_cmp_ps(a.lanes, b.lanes, _CMP_LT_OQ); }
inline Mask operator<=(Vec a, Vec b) { return _mm256_cmp_ps(a.lanes, b.lanes, _CMP_LE_OQ); }
inline Mask operator==(Vec a, Vec b) { return _mm256_cmp_ps(a.lanes, b.lanes, _CMP_EQ_OQ); }
inline Mask operator&(Mask a, Mask b) { return _mm256_and_ps(a.lanes, b.lanes); }
inline Mask operator|(Mask a, Mask b) { return _mm256_or_ps(a.lanes, b.lanes); }
inline Mask operator!(Mask a) {
  return _mm256_xor_ps(a.lanes, _mm256_castsi256_ps(_mm256_set1_epi32(-1)));
}
inline bool any(Mask a) { return _mm256_movemask_ps(a.lanes) != 0; }

inline Vec select(Mask mask, Vec a, Vec b) {
  return _mm256_blendv_ps(b.lanes, a.lanes, mask.lanes);
}

// The instructions give b when either is NaN, so only a NaN in a is left to see to.
inline Vec min(Vec a, Vec b) { return select(a == a, _mm256_min_ps(a.lanes, b.lanes), a); }
inline Vec max(Vec a, Vec b) { return select(a == a, _mm256_max_ps(a.lanes, b.lanes), a); }

struct Ints {  // unsigned, 32 bits
  static constexpr int size = 8;
  __m256i lanes;

  Ints() = default;
  Ints(uint32_t value) : lanes(_mm256_set1_epi32(int(value))) {}
  Ints(__m256i value) : lanes(value) {}

  static Ints from(uint32_t first) {
    const __m256i lane_index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_add_epi32(_mm256_set1_epi32(int(first)), lane_index);
  }

  template <class T>
  static Ints load(const T* source, int count) {
    __m128i buffer = _mm_setzero_si128();
    memcpy(&buffer, source, count == size ? size * sizeof(T) : count * sizeof(T));
    if (T(-1) < T(0)) return _mm256_cvtepi16_epi32(buffer);
    return sizeof(T) == 1 ? _mm256_cvtepu8_epi32(buffer) : _mm256_cvtepu16_epi32(buffer);
  }

  template <class T>
  void store(T* target, int count) const {
    const __m256i low = _mm256_and_si256(lanes, _mm256_set1_epi32(T(~T(0))));
    __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    if (sizeof(T) == 1) packed = _mm_packus_epi16(packed, packed);
    memcpy(target, &packed, count == size ? size * sizeof(T) : count * sizeof(T));
  }
};

inline Ints operator+(Ints a, Ints b) { return _mm256_add_epi32(a.lanes, b.lanes); }
inline Ints operator-(Ints a, Ints b) { return _mm256_sub_epi32(a.lanes, b.lanes); }
inline Ints operator*(Ints a, Ints b) { return _mm256_mullo_epi32(a.lanes, b.lanes); }
inline Ints operator&(Ints a, Ints b) { return _mm256_and_si256(a.lanes, b.lanes); }
inline Ints operator|(Ints a, Ints b) { return _mm256_or_si256(a.lanes, b.lanes); }
inline Ints operator^(Ints a, Ints b) { return _mm256_xor_si256(a.lanes, b.lanes); }
template <int bits>
inline Ints shift_left(Ints a) {
  return _mm256_slli_epi32(a.lanes, bits);
}
template <int bits>
inline Ints shift_right(Ints a) {
  return _mm256_srli_epi32(a.lanes, bits);
}
inline Ints min(Ints a, Ints b) { return _mm256_min_epu32(a.lanes, b.lanes); }
inline Ints max(Ints a, Ints b) { return _mm256_max_epu32(a.lanes, b.lanes); }
inline uint32_t max_of(Ints a) {
  __m128i half =
      _mm_max_epu32(_mm256_castsi256_si128(a.lanes), _mm256_extracti128_si256(a.lanes, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
  return uint32_t(_mm_cvtsi128_si32(half));
}
inline Ints blend_bits(Ints mask, Ints a, Ints b) {
  return _mm256_or_si256(_mm256_and_si256(mask.lanes, a.lanes),
                         _mm256_andnot_si256(mask.lanes, b.lanes));
}

inline Ints bits_of(Vec a) { return _mm256_castps_si256(a.lanes); }
inline Vec float_of(Ints a) { return _mm256_castsi256_ps(a.lanes); }
