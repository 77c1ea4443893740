// Vec, Mask and Ints of one lane, for any CPU: what the wider ones must reproduce bit for bit.
struct Mask {
  bool lane;
};

struct Vec {
  static constexpr int size = 1, registers = 1;
  float lane;

  Vec() = default;
  Vec(float value) : lane(value) {}

  template <class T>
  static Vec load(const T* source, int /*count*/) {
    return to_float(*source);
  }

  template <class T>
  void store(T* target, int /*count*/, bool /*past_cache*/ = false) const {
    *target = from_float<T>(lane);
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
};

inline Vec operator+(Vec a, Vec b) { return a.lane + b.lane; }
inline Vec operator-(Vec a, Vec b) { return a.lane - b.lane; }
inline Vec operator*(Vec a, Vec b) { return a.lane * b.lane; }
inline Vec operator/(Vec a, Vec b) { return a.lane / b.lane; }
inline Vec operator-(Vec a) { return -a.lane; }
inline Vec min(Vec a, Vec b) { return dsx::min(a.lane, b.lane); }
inline Vec max(Vec a, Vec b) { return dsx::max(a.lane, b.lane); }
inline Vec abs(Vec a) { return std::abs(a.lane); }
inline Vec sqrt(Vec a) { return std::sqrt(a.lane); }
inline Vec floor(Vec a) { return std::floor(a.lane); }
inline Vec round_even(Vec a) { return dsx::round_even(a.lane); }

inline Mask operator<(Vec a, Vec b) { return {a.lane < b.lane}; }
inline Mask operator<=(Vec a, Vec b) { return {a.lane <= b.lane}; }
inline Mask operator==(Vec a, Vec b) { return {a.lane == b.lane}; }
inline Mask operator&(Mask a, Mask b) { return {a.lane && b.lane}; }
inline Mask operator|(Mask a, Mask b) { return {a.lane || b.lane}; }
inline Mask operator!(Mask a) { return {!a.lane}; }
inline bool any(Mask a) { return a.lane; }

inline Vec select(Mask mask, Vec a, Vec b) { return dsx::select(mask.lane, a.lane, b.lane); }

struct Ints {  // unsigned, 32 bits; arithmetic is modulo 2^32
  static constexpr int size = 1;
  uint32_t lane;

  Ints() = default;
  Ints(uint32_t value) : lane(value) {}

  // first, first + 1 ...
  static Ints from(uint32_t first) { return first; }

  // As many words as there are lanes, wherever they lie.
  static Ints load_words(const void* source) {
    Ints words;
    memcpy(&words.lane, source, sizeof(words.lane));
    return words;
  }

  template <class T>  // uint8_t, uint16_t, or int16_t, whose sign is extended
  static Ints load(const T* source, int /*count*/) {
    return uint32_t(*source);
  }

  // The lower bits of each lane.
  template <class T>
  void store(T* target, int /*count*/, bool /*past_cache*/ = false) const {
    *target = T(lane);
  }

  // The same in the upper bits of each lane, with zeros below (vec_derived.inl).
  template <class T>
  static Ints load_upper(const T* source, int count);
  template <class T>
  void store_upper(T* target, int count) const;
};

inline Ints operator+(Ints a, Ints b) { return a.lane + b.lane; }
inline Ints operator-(Ints a, Ints b) { return a.lane - b.lane; }
inline Ints operator*(Ints a, Ints b) { return a.lane * b.lane; }
inline Ints operator&(Ints a, Ints b) { return a.lane & b.lane; }
inline Ints operator|(Ints a, Ints b) { return a.lane | b.lane; }
inline Ints operator^(Ints a, Ints b) { return a.lane ^ b.lane; }
template <int bits>
inline Ints shift_left(Ints a) {
  return a.lane << bits;
}
template <int bits>
inline Ints shift_right(Ints a) {
  return a.lane >> bits;
}
inline Ints min(Ints a, Ints b) { return a.lane < b.lane ? a : b; }
inline Ints max(Ints a, Ints b) { return a.lane > b.lane ? a : b; }
inline uint32_t max_of(Ints a) { return a.lane; }  // of all lanes
inline Ints blend_bits(Ints mask, Ints a, Ints b) {
  return (a.lane & mask.lane) | (b.lane & ~mask.lane);
}

inline Ints bits_of(Vec a) { return dsx::bits_of(a.lane); }
inline Vec float_of(Ints a) { return dsx::float_of(a.lane); }
inline Vec signed_numbers(Ints a) { return float(int32_t(a.lane)); }  // two's complement, rounded

// As in common/math.h.
inline Vec scale_and_add(Vec a, Vec scale, Vec b) { return a * scale + b; }
// a * b + c, rounded once.
inline Vec multiply_add(Vec a, Vec b, Vec c) { return std::fma(a.lane, b.lane, c.lane); }

// Bytes number `first` and first + 1 of each lane as its middle ones, beside zeros.
template <int first>
inline Ints bytes_to_middle(Ints a) {
  return shift_left<8>(first == 0 ? a & Ints(0xffffu) : shift_right<16>(a));
}

// 16 floats, of which each lane of some Ints takes the one that its lowest four bits name. They
// stay where they are.
struct Lookup {
  const float* values;

  explicit Lookup(const float* source) : values(source) {}

  Vec operator[](Ints places) const { return values[places.lane & 15]; }
};

// Of 16 lanes, of which number 4 i + j is source[i * pitch], those from part * Vec::size on.
inline Vec load_fours(const float* source, int64_t pitch, int part) {
  return Vec(source[part / 4 * pitch]);
}

// Dot products of bytes, which do not overflow 32 bits in the end: to each lane of `sum`, those of
// the four bytes of a, numbers of kBits without sign, and of b, with sign.
struct Dots {
  template <int kBits>
  static Ints add(Ints sum, Ints a, Ints b) {
    for (int shift = 0; shift < 32; shift += 8) {
      sum.lane += (a.lane >> shift & 0xff) * uint32_t(int8_t(b.lane >> shift));
    }
    return sum;
  }
};
