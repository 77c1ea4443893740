// The formulas of rope, for a SIMD register or for floats in CUDA. Su et al., "RoFormer: Enhanced
// Transformer with Rotary Position Embedding", 2021, equations 15 and 34.
//
// Angles are counted in turns, in 2^-64 of one, as unsigned integers: position * frequency then
// wraps around as angles do, and is exact for every position. What is left of an angle after the
// nearest quarter turn is a float, with all its digits.

// Of radians from one position to the next, which are finite.
DSX_HOST_DEVICE inline uint64_t in_turns(double radians) {
  const double turns = radians * 0.15915494309189535;  // 1 / (2 pi)
  const double part = turns - ::floor(turns);
  return part < 1 ? uint64_t(part * 0x1p64) : 0;  // it rounds to 1 just below 0
}

DSX_HOST_DEVICE inline bool is_finite(double a) { return a - a == 0; }

// The angle of position p is p times the frequency. Unsigned, as -p may be beyond the integers.
DSX_HOST_DEVICE inline uint64_t position_of(const Rope& call, int64_t batch, int64_t token) {
  const uint64_t position = uint64_t(call.positions.at(batch, token));
  return call.negative ? 0 - position : position;
}

// An angle: quarter turns, as their cosine and sine, and the rest, of pi / 4 at most.
struct Angle {
  float rest, quarter_cos, quarter_sin;
};
DSX_HOST_DEVICE inline Angle angle_at(uint64_t position, uint64_t frequency) {
  const uint32_t turns = uint32_t(position * frequency >> 32);  // in 2^-32
  const uint32_t quarters = (turns + (1u << 29)) >> 30;         // 4 as 0
  const int32_t rest = int32_t(turns - (quarters << 30));
  return {float(rest) * 1.46291808e-9f,  // 2^-31 pi
          float(int(quarters % 4 == 0) - int(quarters % 4 == 2)),
          float(int(quarters % 4 == 1) - int(quarters % 4 == 3))};
}

template <class V>
struct Rotation {
  V cos, sin;
};
template <class V>
DSX_HOST_DEVICE inline Rotation<V> rotation(const V& rest, const V& quarter_cos,
                                            const V& quarter_sin, float scale) {
  const V c = small_cos(rest), s = small_sin(rest);
  return {(quarter_cos * c - quarter_sin * s) * V(scale),
          (quarter_sin * c + quarter_cos * s) * V(scale)};
}

// The first of a pair, then the second.
template <class V>
DSX_HOST_DEVICE inline V rotated_first(const V& first, const V& second, const Rotation<V>& r) {
  return first * r.cos - second * r.sin;
}
template <class V>
DSX_HOST_DEVICE inline V rotated_second(const V& first, const V& second, const Rotation<V>& r) {
  return second * r.cos + first * r.sin;
}
