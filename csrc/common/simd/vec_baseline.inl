// Vec, Mask and Ints of 4 lanes in the vectors of the compiler: for the instructions that every CPU
// of an architecture has, SSE2 on x86-64 and NEON on 64-bit ARM. Conversions are those of
// common/dtype.h, with a choice of lanes in the place of each branch.
typedef float FloatLanes __attribute__((vector_size(16)));
typedef uint32_t IntLanes __attribute__((vector_size(16)));

struct Mask {
  IntLanes lanes;  // all bits of a lane set: true; none: false
};

struct Ints {  // unsigned, 32 bits
  static constexpr int size = 4;
  IntLanes lanes;

  Ints() = default;
  Ints(uint32_t value) : lanes{value, value, value, value} {}
  Ints(IntLanes value) : lanes(value) {}

  static Ints from(uint32_t first) { return IntLanes{first, first + 1, first + 2, first + 3}; }

  static Ints load_words(const void* source) {
    Ints words;
    memcpy(&words.lanes, source, sizeof(words.lanes));
    return words;
  }

  template <class T>
  static Ints load(const T* source, int count) {
    typedef T Narrow __attribute__((vector_size(size * sizeof(T))));
    Narrow narrow{};
    memcpy(&narrow, source, count == size ? sizeof(narrow) : count * sizeof(T));
    return __builtin_convertvector(narrow, IntLanes);
  }

  template <class T>
  void store(T* target, int count) const {
    typedef T Narrow __attribute__((vector_size(size * sizeof(T))));
    const Narrow narrow = __builtin_convertvector(lanes, Narrow);
    memcpy(target, &narrow, count == size ? sizeof(narrow) : count * sizeof(T));
  }

  // The same in the upper bits of each lane, with zeros below (vec_derived.inl).
  template <class T>
  static Ints load_upper(const T* source, int count);
  template <class T>
  void store_upper(T* target, int count) const;
};

inline Ints operator+(Ints a, Ints b) { return a.lanes + b.lanes; }
inline Ints operator-(Ints a, Ints b) { return a.lanes - b.lanes; }
inline Ints operator*(Ints a, Ints b) { return a.lanes * b.lanes; }
inline Ints operator&(Ints a, Ints b) { return a.lanes & b.lanes; }
inline Ints operator|(Ints a, Ints b) { return a.lanes | b.lanes; }
inline Ints operator^(Ints a, Ints b) { return a.lanes ^ b.lanes; }
template <int bits>
inline Ints shift_left(Ints a) {
  return a.lanes << bits;
}
template <int bits>
inline Ints shift_right(Ints a) {
  return a.lanes >> bits;
}
inline Ints blend_bits(Ints mask, Ints a, Ints b) {
  return (a.lanes & mask.lanes) | (b.lanes & ~mask.lanes);
}
inline Ints select(Mask mask, Ints a, Ints b) { return blend_bits(mask.lanes, a, b); }
inline Mask operator<(Ints a, Ints b) { return {IntLanes(a.lanes < b.lanes)}; }
inline Ints min(Ints a, Ints b) { return select(a < b, a, b); }
inline Ints max(Ints a, Ints b) { return select(a < b, b, a); }
inline uint32_t max_of(Ints a) {
  const uint32_t low = dsx::max(a.lanes[0], a.lanes[1]);
  return dsx::max(low, dsx::max(a.lanes[2], a.lanes[3]));
}

struct Vec {
  static constexpr int size = 4, registers = 1;
  FloatLanes lanes;

  Vec() = default;
  Vec(float value) : lanes{value, value, value, value} {}
  Vec(FloatLanes value) : lanes(value) {}

  static Vec load(const float* source, int count) {
    FloatLanes lanes{};
    memcpy(&lanes, source, count == size ? sizeof(lanes) : count * sizeof(float));
    return lanes;
  }

  static Vec load(const BFloat16* source, int count) {
    return FloatLanes(load_16bit(source, count).lanes << 16);
  }

  static Vec load(const Half* source, int count) {
    const IntLanes bits = load_16bit(source, count).lanes;
    const IntLanes magnitude = bits & 0x7fff;
    const FloatLanes subnormal = __builtin_convertvector(magnitude, FloatLanes) * 0x1p-24f;
    const Ints shift = select({IntLanes(magnitude < 0x7c00)}, (127u - 15) << 23, (255u - 31) << 23);
    const Ints normal = (magnitude << 13) + shift.lanes;
    const Ints value = select({IntLanes(magnitude < 0x0400)}, IntLanes(subnormal), normal);
    return FloatLanes(value.lanes | (bits & 0x8000) << 16);
  }

  void store(float* target, int count, bool /*past_cache*/ = false) const {
    memcpy(target, &lanes, count == size ? sizeof(lanes) : count * sizeof(float));
  }

  void store(BFloat16* target, int count, bool /*past_cache*/ = false) const {
    const IntLanes bits = IntLanes(lanes);
    store_16bit(target, count, (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }

  void store(Half* target, int count, bool /*past_cache*/ = false) const {
    const IntLanes sign = IntLanes(lanes) >> 16 & 0x8000;
    const IntLanes magnitude = IntLanes(lanes) & 0x7fffffff;
    const IntLanes subnormal = IntLanes(FloatLanes(magnitude) + 0.5f) - dsx::bits_of(0.5f);
    const IntLanes odd = magnitude >> 13 & 1;
    const IntLanes normal = (magnitude - ((127u - 15) << 23) + 0xfff + odd) >> 13;
    const Mask small{IntLanes(magnitude < dsx::bits_of(0x1p-14f))};
    const Mask large{IntLanes(magnitude >= dsx::bits_of(65520.0f))};
    const Ints rounded = select(large, 0x7c00u, select(small, subnormal, normal));
    store_16bit(target, count, sign | rounded.lanes);
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
  template <class T>
  static Ints load_16bit(const T* source, int count) {
    return Ints::load(reinterpret_cast<const uint16_t*>(source), count);
  }

  // Lanes that are NaN are stored as T::kQuietNan.
  template <class T>
  void store_16bit(T* target, int count, IntLanes narrowed) const {
    const Mask is_number{IntLanes(lanes == lanes)};
    const Ints stored = select(is_number, narrowed, uint32_t(T::kQuietNan));
    stored.store(reinterpret_cast<uint16_t*>(target), count);
  }
};

inline Vec operator+(Vec a, Vec b) { return a.lanes + b.lanes; }
inline Vec operator-(Vec a, Vec b) { return a.lanes - b.lanes; }
inline Vec operator*(Vec a, Vec b) { return a.lanes * b.lanes; }
inline Vec operator/(Vec a, Vec b) { return a.lanes / b.lanes; }
inline Vec operator-(Vec a) { return FloatLanes(IntLanes(a.lanes) ^ 0x80000000); }
inline Vec abs(Vec a) { return FloatLanes(IntLanes(a.lanes) & 0x7fffffff); }

inline Mask operator<(Vec a, Vec b) { return {IntLanes(a.lanes < b.lanes)}; }
inline Mask operator<=(Vec a, Vec b) { return {IntLanes(a.lanes <= b.lanes)}; }
inline Mask operator==(Vec a, Vec b) { return {IntLanes(a.lanes == b.lanes)}; }
inline Mask operator&(Mask a, Mask b) { return {a.lanes & b.lanes}; }
inline Mask operator|(Mask a, Mask b) { return {a.lanes | b.lanes}; }
inline Mask operator!(Mask a) { return {~a.lanes}; }
inline bool any(Mask a) {
  uint64_t halves[2];
  memcpy(halves, &a, sizeof(halves));
  return (halves[0] | halves[1]) != 0;
}

inline Ints bits_of(Vec a) { return IntLanes(a.lanes); }
inline Vec float_of(Ints a) { return FloatLanes(a.lanes); }
inline Vec signed_numbers(Ints a) {
  typedef int32_t SignedLanes __attribute__((vector_size(16)));
  return __builtin_convertvector(SignedLanes(a.lanes), FloatLanes);
}

inline Vec select(Mask mask, Vec a, Vec b) {
  return float_of(select(mask, bits_of(a), bits_of(b)));
}
inline Vec min(Vec a, Vec b) { return select((a < b) | !(a == a), a, b); }
inline Vec max(Vec a, Vec b) { return select((b < a) | !(a == a), a, b); }

inline Vec sqrt(Vec a) {
#if defined(__SSE2__)
  return _mm_sqrt_ps(a.lanes);
#elif defined(__aarch64__)
  return vsqrtq_f32(a.lanes);
#else
  for (int k = 0; k < Vec::size; ++k) a.lanes[k] = std::sqrt(a.lanes[k]);
  return a;
#endif
}

// From 2^23 on every float is an integer; adding as much to a smaller one leaves none of its
// fraction.
inline Vec round_even(Vec a) {
  const Vec magnitude = abs(a), large = 0x1p23f;
  const Vec rounded = (magnitude + large) - large;
  const Vec value = select(magnitude < large, rounded, magnitude);
  return float_of(blend_bits(0x80000000u, bits_of(a), bits_of(value)));
}

inline Vec floor(Vec a) {
  const Vec nearest = round_even(a);
  return select(a < nearest, nearest - Vec(1.0f), nearest);
}

// Lanes 0 and 1, 2 and 3 change places.
inline Vec swap_neighbours(Vec a) {
  return FloatLanes{a.lanes[1], a.lanes[0], a.lanes[3], a.lanes[2]};
}

// As in common/math.h.
inline Vec scale_and_add(Vec a, Vec scale, Vec b) { return a * scale + b; }
// a * b + c, rounded once: on x86-64, where few processors lack wider vectors, by calls of the C
// library.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
  FloatLanes sum;
  for (int i = 0; i < Vec::size; ++i) sum[i] = std::fma(a.lanes[i], b.lanes[i], c.lanes[i]);
  return sum;
}

// Bytes number `first` and first + 1 of each lane as its middle ones, beside zeros.
template <int first>
inline Ints bytes_to_middle(Ints a) {
  return shift_left<8>(first == 0 ? a & Ints(0xffffu) : shift_right<16>(a));
}

// As vec_scalar.inl says.
struct Lookup {
  const float* values;

  explicit Lookup(const float* source) : values(source) {}

  Vec operator[](Ints places) const {
    const IntLanes at = places.lanes & 15;
    return FloatLanes{values[at[0]], values[at[1]], values[at[2]], values[at[3]]};
  }
};

inline Vec load_fours(const float* source, int64_t pitch, int part) {
  return Vec(source[part * pitch]);
}

struct Dots {
  template <int kBits>
  static Ints add(Ints sum, Ints a, Ints b) {
    for (int shift = 0; shift < 32; shift += 8) {
      const IntLanes of_b = ((b.lanes >> shift & 0xff) ^ 0x80) - 0x80;
      sum.lanes += (a.lanes >> shift & 0xff) * of_b;
    }
    return sum;
  }
};
