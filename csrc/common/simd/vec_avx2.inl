// Vec, Mask and Ints of 16 lanes for AVX2 with FMA and F16C. Each is two registers: narrow elements
// are packed into whole ones, and the processor has two chains of operations to work on at a time.
struct Mask {
  __m256 low, high;  // all bits of a lane set: true; none: false

  Mask(__m256 low_lanes, __m256 high_lanes) : low(low_lanes), high(high_lanes) {}
};

// AVX2 has no masked access to narrow elements, so a tail goes through a buffer: this is `source`,
// or the buffer with its `count` elements and zeros behind them.
template <class T>
inline const T* all_lanes(const T* source, int count, T (&buffer)[16]) {
  if (count == 16) return source;
  memset(buffer, 0, sizeof(buffer));
  memcpy(buffer, source, count * sizeof(T));
  return buffer;
}

// 16 bytes in both halves of a register, as shuffles stay within a half.
inline __m256i load_twice(const void* source) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(source)));
}

// For a shuffle of bytes: lane k takes those numbered by the bytes of order + k * step, modulo 16
// in its half of the register; 0x80 stands for zero.
inline __m256i bytes_of_lanes(uint32_t order, uint32_t step) {
  const __m256i lane_index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i steps = _mm256_mullo_epi32(lane_index, _mm256_set1_epi32(int(step)));
  return _mm256_add_epi32(_mm256_set1_epi32(int(order)), steps);
}

struct Ints {  // unsigned, 32 bits
  static constexpr int size = 16;
  __m256i low, high;

  Ints() = default;
  Ints(uint32_t value) : low(_mm256_set1_epi32(int(value))), high(low) {}
  Ints(__m256i low_lanes, __m256i high_lanes) : low(low_lanes), high(high_lanes) {}

  static Ints from(uint32_t first) {
    const __m256i lane_index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm256_add_epi32(_mm256_set1_epi32(int(first)), lane_index),
            _mm256_add_epi32(_mm256_set1_epi32(int(first + 8)), lane_index)};
  }

  // As memcpy would, whose pieces a load of what they have stored would wait for.
  static Ints load_words(const void* source) {
    const auto halves = static_cast<const __m256i*>(source);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
  }

  static Ints load(const int16_t* source, int count) {
    int16_t buffer[16];
    const auto halves = reinterpret_cast<const __m128i*>(all_lanes(source, count, buffer));
    return {_mm256_cvtepi16_epi32(_mm_loadu_si128(halves)),
            _mm256_cvtepi16_epi32(_mm_loadu_si128(halves + 1))};
  }

  static Ints load(const uint16_t* source, int count) {
    uint16_t buffer[16];
    const auto halves = reinterpret_cast<const __m128i*>(all_lanes(source, count, buffer));
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)),
            _mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1))};
  }

  static Ints load(const uint8_t* source, int count) {
    uint8_t buffer[16];
    const auto halves = reinterpret_cast<const __m128i*>(all_lanes(source, count, buffer));
    const __m128i bytes = _mm_loadu_si128(halves);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
  }

  void store(uint16_t* target, int count) const {
    const __m256i zero = _mm256_setzero_si256();
    store_words(target, count, _mm256_blend_epi16(low, zero, 0xaa),
                _mm256_blend_epi16(high, zero, 0xaa));
  }
  void store(uint8_t* target, int count) const { store_bytes<0>(target, count); }
  // The same in the upper bits of each lane, with zeros below.
  template <class T>
  static Ints load_upper(const T* source, int count);
  template <class T>
  void store_upper(T* target, int count) const;

  // The lower halves of lanes 0 to 7 and 8 to 15, whose upper ones are 0.
  DSX_INLINE static void store_words(uint16_t* target, int count, __m256i a, __m256i b,
                                     bool past_cache = false) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
    if (count != size) {
      memcpy(target, &packed, count * sizeof(*target));
      return;
    }
    const auto whole = reinterpret_cast<__m256i*>(target);
    past_cache ? _mm256_stream_si256(whole, packed) : _mm256_storeu_si256(whole, packed);
  }

 private:
  // Byte number `byte` of each lane.
  template <int byte>
  void store_bytes(uint8_t* target, int count) const {
    constexpr int k = 0x0c080400 + byte * 0x01010101, none = -1;
    const __m256i first = _mm256_setr_epi32(k, none, none, none, k, none, none, none);
    const __m256i second = _mm256_setr_epi32(none, k, none, none, none, k, none, none);
    const __m256i mixed =
        _mm256_or_si256(_mm256_shuffle_epi8(low, first), _mm256_shuffle_epi8(high, second));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 0, 0, 0);
    const __m128i packed = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(mixed, order));
    if (count == size) return _mm_storeu_si128(reinterpret_cast<__m128i*>(target), packed);
    memcpy(target, &packed, count);
  }
};

template <>
inline Ints Ints::load_upper(const uint16_t* source, int count) {
  uint16_t buffer[16];
  source = all_lanes(source, count, buffer);
  const __m256i place = bytes_of_lanes(0x01008080, 0x02020000);
  return {_mm256_shuffle_epi8(load_twice(source), place),
          _mm256_shuffle_epi8(load_twice(source + 8), place)};
}
template <>
inline Ints Ints::load_upper(const uint8_t* source, int count) {
  uint8_t buffer[16];
  const __m256i twice = load_twice(all_lanes(source, count, buffer));
  return {_mm256_shuffle_epi8(twice, bytes_of_lanes(0x00808080, 0x01000000)),
          _mm256_shuffle_epi8(twice, bytes_of_lanes(0x08808080, 0x01000000))};
}
template <>
inline void Ints::store_upper(uint16_t* target, int count) const {
  store_words(target, count, _mm256_srli_epi32(low, 16), _mm256_srli_epi32(high, 16));
}
template <>
inline void Ints::store_upper(uint8_t* target, int count) const {
  store_bytes<3>(target, count);
}

struct Vec {
  static constexpr int size = 16, registers = 2;
  __m256 low, high;  // lanes 0 to 7, 8 to 15

  Vec() = default;
  Vec(float value) : low(_mm256_set1_ps(value)), high(low) {}
  Vec(__m256 low_lanes, __m256 high_lanes) : low(low_lanes), high(high_lanes) {}

  static Vec load(const float* source, int count) {
    if (count == size) return {_mm256_loadu_ps(source), _mm256_loadu_ps(source + 8)};
    return {_mm256_maskload_ps(source, first_lanes(count)),
            _mm256_maskload_ps(source + 8, first_lanes(count - 8))};
  }

  static Vec load(const BFloat16* source, int count) {
    const Ints bits = Ints::load_upper(reinterpret_cast<const uint16_t*>(source), count);
    return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)};
  }

  static Vec load(const Half* source, int count) {
    Half buffer[16];
    const auto halves = reinterpret_cast<const __m128i*>(all_lanes(source, count, buffer));
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }

  void store(float* target, int count, bool past_cache = false) const {
    if (count == size) {
      past_cache ? _mm256_stream_ps(target, low) : _mm256_storeu_ps(target, low);
      past_cache ? _mm256_stream_ps(target + 8, high) : _mm256_storeu_ps(target + 8, high);
    } else {
      _mm256_maskstore_ps(target, first_lanes(count), low);
      _mm256_maskstore_ps(target + 8, first_lanes(count - 8), high);
    }
  }

  void store(BFloat16* target, int count, bool past_cache = false) const;
  void store(Half* target, int count, bool past_cache = false) const;

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
  static __m256i first_lanes(int count) {
    const __m256i lane_index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane_index);
  }
};

#define DSX_UNARY(Type, From, name, op) \
  inline Type name(From a) { return {op(a.low), op(a.high)}; }
#define DSX_BINARY(Type, From, name, op, ...)               \
  inline Type name(From a, From b) {                        \
    return {op(a.low, b.low __VA_OPT__(, ) __VA_ARGS__),    \
            op(a.high, b.high __VA_OPT__(, ) __VA_ARGS__)}; \
  }
DSX_BINARY(Vec, Vec, operator+, _mm256_add_ps)
DSX_BINARY(Vec, Vec, operator-, _mm256_sub_ps)
DSX_BINARY(Vec, Vec, operator*, _mm256_mul_ps)
DSX_BINARY(Vec, Vec, operator/, _mm256_div_ps)
DSX_UNARY(Vec, Vec, sqrt, _mm256_sqrt_ps)
DSX_UNARY(Vec, Vec, floor, _mm256_floor_ps)
DSX_BINARY(Mask, Vec, operator<, _mm256_cmp_ps, _CMP_LT_OQ)
DSX_BINARY(Mask, Vec, operator<=, _mm256_cmp_ps, _CMP_LE_OQ)
DSX_BINARY(Mask, Vec, operator==, _mm256_cmp_ps, _CMP_EQ_OQ)
DSX_BINARY(Mask, Mask, operator&, _mm256_and_ps)
DSX_BINARY(Mask, Mask, operator|, _mm256_or_ps)
DSX_BINARY(Mask, Mask, operator^, _mm256_xor_ps)
DSX_BINARY(Ints, Ints, operator+, _mm256_add_epi32)
DSX_BINARY(Ints, Ints, operator-, _mm256_sub_epi32)
DSX_BINARY(Ints, Ints, operator*, _mm256_mullo_epi32)
DSX_BINARY(Ints, Ints, operator&, _mm256_and_si256)
DSX_BINARY(Ints, Ints, operator|, _mm256_or_si256)
DSX_BINARY(Ints, Ints, operator^, _mm256_xor_si256)
DSX_BINARY(Ints, Ints, min, _mm256_min_epu32)
DSX_BINARY(Ints, Ints, max, _mm256_max_epu32)
DSX_UNARY(Ints, Vec, bits_of, _mm256_castps_si256)
DSX_UNARY(Vec, Ints, float_of, _mm256_castsi256_ps)
#undef DSX_UNARY
#undef DSX_BINARY

inline Vec operator-(Vec a) { return float_of(bits_of(a) ^ Ints(0x80000000u)); }
inline Vec abs(Vec a) { return float_of(bits_of(a) & Ints(0x7fffffffu)); }
inline Vec round_even(Vec a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, kNearest), _mm256_round_ps(a.high, kNearest)};
}
inline Vec scale_and_add(Vec a, Vec scale, Vec b) {  // as in common/math.h
  return {_mm256_fmadd_ps(a.low, scale.low, b.low), _mm256_fmadd_ps(a.high, scale.high, b.high)};
}
inline Vec multiply_add(Vec a, Vec b, Vec c) { return scale_and_add(a, b, c); }  // rounded once

// The instructions give the second operand when either is NaN.
inline Vec at_least(Vec a, float least) {
  const __m256 bound = _mm256_set1_ps(least);
  return {_mm256_max_ps(bound, a.low), _mm256_max_ps(bound, a.high)};
}
inline Vec at_most(Vec a, float most) {
  const __m256 bound = _mm256_set1_ps(most);
  return {_mm256_min_ps(bound, a.low), _mm256_min_ps(bound, a.high)};
}

// Lanes 0 and 1, 2 and 3 ... change places.
inline Vec swap_neighbours(Vec a) {
  return {_mm256_permute_ps(a.low, 0xb1), _mm256_permute_ps(a.high, 0xb1)};
}

inline Mask operator!(Mask a) {
  const __m256 all = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  return a ^ Mask(all, all);
}
inline bool any(Mask a) { return _mm256_movemask_ps(_mm256_or_ps(a.low, a.high)) != 0; }

inline Vec select(Mask mask, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.low, a.low, mask.low), _mm256_blendv_ps(b.high, a.high, mask.high)};
}

// The instructions give b when either is NaN, so only a NaN in a is left to see to.
inline Vec min(Vec a, Vec b) {
  return select(a == a, {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}, a);
}
inline Vec max(Vec a, Vec b) {
  return select(a == a, {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}, a);
}

template <int bits>
inline Ints shift_left(Ints a) {
  return {_mm256_slli_epi32(a.low, bits), _mm256_slli_epi32(a.high, bits)};
}
template <int bits>
inline Ints shift_right(Ints a) {
  return {_mm256_srli_epi32(a.low, bits), _mm256_srli_epi32(a.high, bits)};
}
inline Vec signed_numbers(Ints a) {
  return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)};
}
inline uint32_t max_of(Ints a) {
  const __m256i both = _mm256_max_epu32(a.low, a.high);
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
  return uint32_t(_mm_cvtsi128_si32(half));
}
inline Ints blend_bits(Ints mask, Ints a, Ints b) {
  return (a & mask) |
         Ints(_mm256_andnot_si256(mask.low, b.low), _mm256_andnot_si256(mask.high, b.high));
}

// Bytes number `first` and first + 1 of each lane as its middle ones, beside zeros.
template <int first>
inline Ints bytes_to_middle(Ints a) {
  const __m256i places = bytes_of_lanes(first == 0 ? 0x80010080 : 0x80030280, 0x00040400);
  return {_mm256_shuffle_epi8(a.low, places), _mm256_shuffle_epi8(a.high, places)};
}

DSX_INLINE void Vec::store(BFloat16* target, int count, bool past_cache) const {
  const Ints bits = bits_of(*this);
  const Ints rounded = bits + (shift_right<16>(bits) & Ints(1u)) + Ints(0x7fffu);
  const Vec stored =
      select(*this == *this, float_of(rounded), float_of(Ints(BFloat16::kQuietNan << 16)));
  const Ints upper = shift_right<16>(bits_of(stored));
  Ints::store_words(reinterpret_cast<uint16_t*>(target), count, upper.low, upper.high, past_cache);
}

DSX_INLINE void Vec::store(Half* target, int count, bool past_cache) const {
  const __m128i halves[] = {_mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT)};
  const Ints rounded(_mm256_cvtepu16_epi32(halves[0]), _mm256_cvtepu16_epi32(halves[1]));
  const Vec stored = select(*this == *this, float_of(rounded), float_of(Ints(Half::kQuietNan)));
  const Ints bits = bits_of(stored);
  Ints::store_words(reinterpret_cast<uint16_t*>(target), count, bits.low, bits.high, past_cache);
}

// 2 lanes of each, from 4.
inline __m128 added_halves(__m128 a, __m128 b) {
  return _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
}

// As vec_derived.inl says.
inline void store_lane_sums(const Vec (&a)[4][1], float* target) {
  __m128 quarters[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 half = _mm256_add_ps(a[i][0].low, a[i][0].high);
    quarters[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  const __m128 first = added_halves(quarters[0], quarters[1]);
  const __m128 second = added_halves(quarters[2], quarters[3]);
  _mm_storeu_ps(
      target, _mm_add_ps(_mm_shuffle_ps(first, second, 0x88), _mm_shuffle_ps(first, second, 0xdd)));
}

// As vec_scalar.inl says.
struct Lookup {
  __m256 low, high;

  explicit Lookup(const float* source)
      : low(_mm256_loadu_ps(source)), high(_mm256_loadu_ps(source + 8)) {}

  Vec operator[](Ints places) const { return {at(places.low), at(places.high)}; }

 private:
  __m256 at(__m256i places) const {  // three bits choose from either half, the fourth one between
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(places, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, places),
                            _mm256_permutevar8x32_ps(high, places), upper);
  }
};

inline Vec load_fours(const float* source, int64_t pitch, int /*part*/) {
  return {
      _mm256_set_m128(_mm_broadcast_ss(source + pitch), _mm_broadcast_ss(source)),
      _mm256_set_m128(_mm_broadcast_ss(source + 3 * pitch), _mm_broadcast_ss(source + 2 * pitch))};
}

struct Dots {
  template <int kBits>
  static Ints add(Ints sum, Ints a, Ints b) {
    return {added<kBits>(sum.low, a.low, b.low), added<kBits>(sum.high, a.high, b.high)};
  }

 private:
  template <int kBits>
  static __m256i added(__m256i sum, __m256i a, __m256i b) {
    if constexpr (kBits <= 7) {  // two products fit 16 bits: nothing saturates
      const __m256i pairs = _mm256_maddubs_epi16(a, b);
      return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    } else {
      const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xff)),
                                             _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
      const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
      return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
    }
  }
};

// Of four times eight lanes, the sums of each four: of the first ones, then of the others.
inline __m256i sums_of_fours(__m256i a, __m256i b, __m256i c, __m256i d) {
  return _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
}

// As vec_derived.inl says.
inline void sums_of_fours(const Ints (&a)[4][1], Ints (&sums)[1]) {
  sums[0] = {sums_of_fours(a[0][0].low, a[1][0].low, a[2][0].low, a[3][0].low),
             sums_of_fours(a[0][0].high, a[1][0].high, a[2][0].high, a[3][0].high)};
}
inline void transpose_quarters(const Ints (&a)[4][1], Ints (&b)[4][1]) {
  b[0][0] = {_mm256_permute2x128_si256(a[0][0].low, a[1][0].low, 0x20),
             _mm256_permute2x128_si256(a[2][0].low, a[3][0].low, 0x20)};
  b[1][0] = {_mm256_permute2x128_si256(a[0][0].low, a[1][0].low, 0x31),
             _mm256_permute2x128_si256(a[2][0].low, a[3][0].low, 0x31)};
  b[2][0] = {_mm256_permute2x128_si256(a[0][0].high, a[1][0].high, 0x20),
             _mm256_permute2x128_si256(a[2][0].high, a[3][0].high, 0x20)};
  b[3][0] = {_mm256_permute2x128_si256(a[0][0].high, a[1][0].high, 0x31),
             _mm256_permute2x128_si256(a[2][0].high, a[3][0].high, 0x31)};
}
