// Elements of keys and values as floats, whatever they are stored as; codes without their scale.

template <class T>
inline Vec load_kv(const T* source, int count) {
  return Vec::load(source, count);
}

inline Vec load_kv(const Int8Kv* source, int count) {
  const Ints bits = Ints::load(reinterpret_cast<const uint8_t*>(source), count);
  // Above 2^23 the last bits of a float are an integer.
  return float_of((bits ^ Ints(0x80u)) + Ints(0x4b000000u)) - Vec(0x1p23f + 128.0f);
}

inline Vec load_kv(const Fp8Kv* source, int count) {
  const Ints bits = Ints::load(reinterpret_cast<const uint8_t*>(source), count);
  const Ints magnitude = bits & Ints(0x7fu);
  const Vec normal = float_of(shift_left<20>(magnitude) + Ints((127u - 7) << 23));
  const Vec integer = float_of(magnitude + Ints(0x4b000000u)) - Vec(0x1p23f);
  Vec value = select(integer < Vec(8.0f), integer * Vec(0x1p-9f), normal);
  value = select(integer == Vec(127.0f), float_of(Ints(0x7fc00000u)), value);
  return float_of(bits_of(value) | shift_left<24>(bits & Ints(0x80u)));
}
