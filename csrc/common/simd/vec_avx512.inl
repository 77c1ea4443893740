// Vec, Mask and Ints of 16 lanes for AVX-512 F, BW and VL. Full vectors take the faster, unmasked
// forms. The bf16 instructions of AVX512_BF16 are not used: they flush subnormals to zero.
struct Mask {
  __mmask16 lanes;  // one bit each

  Mask(__mmask16 value) : lanes(value) {}
};

struct Vec {
  static constexpr int size = 16, registers = 1;
  __m512 lanes;

  Vec() = default;
  Vec(float value) : lanes(_mm512_set1_ps(value)) {}
  Vec(__m512 value) : lanes(value) {}

  static Vec load(const float* source, int count) {
    if (count == size) return _mm512_loadu_ps(source);
    return _mm512_maskz_loadu_ps(first_lanes(count), source);
  }

  static Vec load(const BFloat16* source, int count) {
    const __m512i upper_half = _mm512_cvtepu16_epi32(load_16bit(source, count));
    return _mm512_castsi512_ps(_mm512_slli_epi32(upper_half, 16));
  }

  static Vec load(const Half* source, int count) {
    return _mm512_cvtph_ps(load_16bit(source, count));
  }

  void store(float* target, int count, bool past_cache = false) const {
    if (count != size) return _mm512_mask_storeu_ps(target, first_lanes(count), lanes);
    past_cache ? _mm512_stream_ps(target, lanes) : _mm512_storeu_ps(target, lanes);
  }

  // The upper halves, once what rounds them is added: a NaN becomes kQuietNan instead.
  DSX_INLINE void store(BFloat16* target, int count, bool past_cache = false) const {
    const __m512i bits = _mm512_castps_si512(lanes), one = _mm512_set1_epi32(1);
    const __mmask16 is_number = _mm512_cmp_ps_mask(lanes, lanes, _CMP_ORD_Q);
    const __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    __m512i rounded = _mm512_set1_epi32(BFloat16::kQuietNan << 16);
    rounded = _mm512_mask_add_epi32(rounded, is_number, bits, _mm512_set1_epi32(0x7fff));
    rounded = _mm512_mask_add_epi32(rounded, is_odd, rounded, one);
    const __m512i narrowed = _mm512_permutexvar_epi16(upper_halves(), rounded);
    store_16bit(target, count, past_cache, _mm512_castsi512_si256(narrowed));
  }

  void store(Half* target, int count, bool past_cache = false) const {
    const __mmask16 is_nan = _mm512_cmp_ps_mask(lanes, lanes, _CMP_UNORD_Q);
    const __m256i narrowed = _mm512_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT);
    const __m256i quiet_nan = _mm256_set1_epi16(Half::kQuietNan);
    store_16bit(target, count, past_cache, _mm256_mask_mov_epi16(narrowed, is_nan, quiet_nan));
  }

  template <class T>
  static Vec load(Pointer<T> source, int count) {
    return load(source.address, count);
  }

  template <class T>
  void store(Pointer<T> target, int count, bool past_cache = false) const {
    store(target.address, count, past_cache);
  }

  static Vec load(Pointer<Any> source, int count);  // vec_derived.inl
  void store(Pointer<Any> target, int count, bool past_cache = false) const;

 private:
  static __mmask16 first_lanes(int count) { return __mmask16((1u << count) - 1); }

  template <class T>
  static __m256i load_16bit(const T* source, int count) {
    if (count == size) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return _mm256_maskz_loadu_epi16(first_lanes(count), source);
  }

  template <class T>
  DSX_INLINE static void store_16bit(T* target, int count, bool past_cache, __m256i narrowed) {
    if (count != size) return _mm256_mask_storeu_epi16(target, first_lanes(count), narrowed);
    const auto whole = reinterpret_cast<__m256i*>(target);
    past_cache ? _mm256_stream_si256(whole, narrowed) : _mm256_storeu_si256(whole, narrowed);
  }

  // The words 1, 3, 5 ...
  static __m512i upper_halves() {
    const __m512i lane_index =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_epi32(_mm512_mullo_epi32(lane_index, _mm512_set1_epi32(0x40004)),
                            _mm512_set1_epi32(0x30001));
  }
};

inline Vec operator+(Vec a, Vec b) { return _mm512_add_ps(a.lanes, b.lanes); }
inline Vec operator-(Vec a, Vec b) { return _mm512_sub_ps(a.lanes, b.lanes); }
inline Vec operator*(Vec a, Vec b) { return _mm512_mul_ps(a.lanes, b.lanes); }
inline Vec operator/(Vec a, Vec b) { return _mm512_div_ps(a.lanes, b.lanes); }
inline Vec operator-(Vec a) {
  const __m512i sign = _mm512_set1_epi32(INT32_MIN);
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a.lanes), sign));
}
inline Vec abs(Vec a) { return _mm512_abs_ps(a.lanes); }
inline Vec scale_and_add(Vec a, Vec scale, Vec b) {  // as in common/math.h
  return _mm512_fmadd_ps(a.lanes, scale.lanes, b.lanes);
}
inline Vec multiply_add(Vec a, Vec b, Vec c) { return scale_and_add(a, b, c); }  // rounded once
// The instructions give the second operand when either is NaN.
inline Vec at_least(Vec a, float least) { return _mm512_max_ps(_mm512_set1_ps(least), a.lanes); }
inline Vec at_most(Vec a, float most) { return _mm512_min_ps(_mm512_set1_ps(most), a.lanes); }
inline Vec times_power_of_2(Vec a, Vec k) { return _mm512_scalef_ps(a.lanes, k.lanes); }
inline Vec sqrt(Vec a) { return _mm512_sqrt_ps(a.lanes); }
inline Vec floor(Vec a) {
  return _mm512_roundscale_ps(a.lanes, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
// Lanes 0 and 1, 2 and 3 ... change places.
inline Vec swap_neighbours(Vec a) { return _mm512_permute_ps(a.lanes, 0xb1); }
inline Vec round_even(Vec a) {
  return _mm512_roundscale_ps(a.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Mask operator<(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.lanes, b.lanes, _CMP_LT_OQ); }
inline Mask operator<=(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.lanes, b.lanes, _CMP_LE_OQ); }
inline Mask operator==(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.lanes, b.lanes, _CMP_EQ_OQ); }
inline Mask operator&(Mask a, Mask b) { return __mmask16(a.lanes & b.lanes); }
inline Mask operator|(Mask a, Mask b) { return __mmask16(a.lanes | b.lanes); }
inline Mask operator!(Mask a) { return __mmask16(~a.lanes); }
inline bool any(Mask a) { return a.lanes != 0; }

inline Vec select(Mask mask, Vec a, Vec b) {
  return _mm512_mask_blend_ps(mask.lanes, b.lanes, a.lanes);
}

// The instructions give b when either is NaN, so only a NaN in a is left to see to.
inline Vec min(Vec a, Vec b) { return select(a == a, _mm512_min_ps(a.lanes, b.lanes), a); }
inline Vec max(Vec a, Vec b) { return select(a == a, _mm512_max_ps(a.lanes, b.lanes), a); }

struct Ints {  // unsigned, 32 bits
  static constexpr int size = 16;
  __m512i lanes;

  Ints() = default;
  Ints(uint32_t value) : lanes(_mm512_set1_epi32(int(value))) {}
  Ints(__m512i value) : lanes(value) {}

  static Ints from(uint32_t first) {
    const __m512i lane_index =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_epi32(_mm512_set1_epi32(int(first)), lane_index);
  }

  static Ints load_words(const void* source) { return _mm512_loadu_si512(source); }

  static Ints load(const uint8_t* source, int count) {
    if (count == size) {
      return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    }
    return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first_lanes(count), source));
  }

  static Ints load(const uint16_t* source, int count) {
    if (count == size) {
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
    }
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), source));
  }

  static Ints load(const int16_t* source, int count) {
    if (count == size) {
      return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
    }
    return _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), source));
  }

  void store(uint8_t* target, int count) const {
    const __m128i packed = _mm512_cvtepi32_epi8(lanes);
    if (count == size) return _mm_storeu_si128(reinterpret_cast<__m128i*>(target), packed);
    _mm_mask_storeu_epi8(target, first_lanes(count), packed);
  }

  void store(uint16_t* target, int count) const {
    const __m256i packed = _mm512_cvtepi32_epi16(lanes);
    if (count == size) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), packed);
    _mm256_mask_storeu_epi16(target, first_lanes(count), packed);
  }

  // The same in the upper bits of each lane, with zeros below (vec_derived.inl).
  template <class T>
  static Ints load_upper(const T* source, int count);
  template <class T>
  void store_upper(T* target, int count) const;

 private:
  static __mmask16 first_lanes(int count) { return __mmask16((1u << count) - 1); }
};

inline Ints operator+(Ints a, Ints b) { return _mm512_add_epi32(a.lanes, b.lanes); }
inline Ints operator-(Ints a, Ints b) { return _mm512_sub_epi32(a.lanes, b.lanes); }
inline Ints operator*(Ints a, Ints b) { return _mm512_mullo_epi32(a.lanes, b.lanes); }
inline Ints operator&(Ints a, Ints b) { return _mm512_and_si512(a.lanes, b.lanes); }
inline Ints operator|(Ints a, Ints b) { return _mm512_or_si512(a.lanes, b.lanes); }
inline Ints operator^(Ints a, Ints b) { return _mm512_xor_si512(a.lanes, b.lanes); }
template <int bits>
inline Ints shift_left(Ints a) {
  return _mm512_slli_epi32(a.lanes, bits);
}
template <int bits>
inline Ints shift_right(Ints a) {
  return _mm512_srli_epi32(a.lanes, bits);
}
inline Ints min(Ints a, Ints b) { return _mm512_min_epu32(a.lanes, b.lanes); }
inline Ints max(Ints a, Ints b) { return _mm512_max_epu32(a.lanes, b.lanes); }
inline uint32_t max_of(Ints a) { return _mm512_reduce_max_epu32(a.lanes); }
inline Ints blend_bits(Ints mask, Ints a, Ints b) {
  return _mm512_ternarylogic_epi32(mask.lanes, a.lanes, b.lanes, 0xca);
}

inline Ints bits_of(Vec a) { return _mm512_castps_si512(a.lanes); }
inline Vec float_of(Ints a) { return _mm512_castsi512_ps(a.lanes); }
inline Vec signed_numbers(Ints a) { return _mm512_cvtepi32_ps(a.lanes); }

// Bytes number `first` and first + 1 of each lane as its middle ones, beside zeros.
template <int first>
inline Ints bytes_to_middle(Ints a) {
  constexpr int order = int(first == 0 ? 0x80010080u : 0x80030280u), step = 0x00040400;
  const __m128i places = _mm_setr_epi32(order, order + step, order + 2 * step, order + 3 * step);
  return _mm512_shuffle_epi8(a.lanes, _mm512_broadcast_i32x4(places));
}

// 8 lanes of each, from 16.
inline __m512 added_halves(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}

// As vec_derived.inl says.
inline void store_lane_sums(const Vec (&a)[4][1], float* target) {
  const __m512 first = added_halves(a[0][0].lanes, a[1][0].lanes);
  const __m512 second = added_halves(a[2][0].lanes, a[3][0].lanes);
  __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88),
                              _mm512_shuffle_f32x4(first, second, 0xdd));  // 4 lanes of each
  sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));
  sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
  const __m512i every_fourth = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(target, _mm512_castps512_ps128(_mm512_permutexvar_ps(every_fourth, sums)));
}

// As vec_scalar.inl says.
struct Lookup {
  __m512 values;

  explicit Lookup(const float* source) : values(_mm512_loadu_ps(source)) {}

  Vec operator[](Ints places) const { return _mm512_permutexvar_ps(places.lanes, values); }
};

inline Vec load_fours(const float* source, int64_t pitch, int /*part*/) {
  __m512 lanes = _mm512_set1_ps(source[0]);
  lanes = _mm512_mask_broadcastss_ps(lanes, 0x00f0, _mm_load_ss(source + pitch));
  lanes = _mm512_mask_broadcastss_ps(lanes, 0x0f00, _mm_load_ss(source + 2 * pitch));
  return _mm512_mask_broadcastss_ps(lanes, 0xf000, _mm_load_ss(source + 3 * pitch));
}

struct Dots {
  template <int kBits>
  static Ints add(Ints sum, Ints a, Ints b) {
    if constexpr (kBits <= 7) {  // two products fit 16 bits: nothing saturates
      const __m512i pairs = _mm512_maddubs_epi16(a.lanes, b.lanes);
      return sum + Ints(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    } else {
      const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a.lanes, _mm512_set1_epi16(0xff)),
                                             _mm512_srai_epi16(_mm512_slli_epi16(b.lanes, 8), 8));
      const __m512i odd =
          _mm512_madd_epi16(_mm512_srli_epi16(a.lanes, 8), _mm512_srai_epi16(b.lanes, 8));
      return sum + Ints(even) + Ints(odd);
    }
  }
};

// Sums of lanes 0 and 2, 1 and 3 of four lanes of each, side by side.
inline __m512i added_pairs(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

// As vec_derived.inl says.
inline void sums_of_fours(const Ints (&a)[4][1], Ints (&sums)[1]) {
  const __m512i first = added_pairs(a[0][0].lanes, a[1][0].lanes);
  const __m512i second = added_pairs(a[2][0].lanes, a[3][0].lanes);
  sums[0] =
      _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
}
inline void transpose_quarters(const Ints (&a)[4][1], Ints (&b)[4][1]) {
  const __m512i halves[] = {_mm512_shuffle_i32x4(a[0][0].lanes, a[1][0].lanes, 0x44),
                            _mm512_shuffle_i32x4(a[2][0].lanes, a[3][0].lanes, 0x44),
                            _mm512_shuffle_i32x4(a[0][0].lanes, a[1][0].lanes, 0xee),
                            _mm512_shuffle_i32x4(a[2][0].lanes, a[3][0].lanes, 0xee)};
  b[0][0] = _mm512_shuffle_i32x4(halves[0], halves[1], 0x88);
  b[1][0] = _mm512_shuffle_i32x4(halves[0], halves[1], 0xdd);
  b[2][0] = _mm512_shuffle_i32x4(halves[2], halves[3], 0x88);
  b[3][0] = _mm512_shuffle_i32x4(halves[2], halves[3], 0xdd);
}
