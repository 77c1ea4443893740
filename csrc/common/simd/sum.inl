// Sum16, the sum of the elements of a tensor, or of their squares: 16 sums in double, of which
// element i belongs to number i % 16, whatever the width of Vec. So every ISA gives the same bits.
// For the same sum with any number of threads, each takes whole chunks of kReductionChunk elements,
// counted from the start of the tensor, and the sums of the chunks are added in their order.
class Sum16 {
 public:
  // Both take the first `count` lanes of a vector whose first element is number i, counted from the
  // start of the chunk; i is a multiple of Vec::size. Other lanes may hold anything.
  void add(Vec value, int64_t i, int count) {
    const Lanes lanes = first_lanes(value, count);
    for (int part = 0; part < kParts; ++part) sums(i, part) += widen(lanes, part);
  }

  // The square of a float is exact in double, and neither too large for it nor too small.
  void add_square(Vec value, int64_t i, int count) {
    const Lanes lanes = first_lanes(value, count);
    for (int part = 0; part < kParts; ++part) {
      const Doubles wide = widen(lanes, part);
      sums(i, part) += wide * wide;
    }
  }

  // Not finite only if something that was added, or whose square was, is not finite.
  double total() const {
    double lanes[16];
    memcpy(lanes, sums_, sizeof(lanes));
    for (int half = 8; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
  }

 private:
  // A register of doubles holds half as many lanes as one of floats. The compiler's own vectors, in
  // which arithmetic is lane by lane, are the same for every ISA.
  static constexpr int kParts = Vec::size > 1 ? 2 * Vec::registers : 1;
  static constexpr int kPartSize = Vec::size / kParts;
  typedef float Floats __attribute__((vector_size(kPartSize * sizeof(float))));
  typedef double Doubles __attribute__((vector_size(kPartSize * sizeof(double))));
  struct Lanes {
    Floats parts[kParts];
  };

  static Lanes first_lanes(Vec value, int count) {
    Lanes lanes;
    static_assert(sizeof(lanes) == sizeof(value));
    memcpy(&lanes, &value, sizeof(lanes));
    if (count == Vec::size) return lanes;
    float buffer[Vec::size] = {};
    value.store(buffer, count);
    memcpy(&lanes, buffer, sizeof(lanes));
    return lanes;
  }

  static Doubles widen(const Lanes& lanes, int part) {
    return __builtin_convertvector(lanes.parts[part], Doubles);
  }

  Doubles& sums(int64_t i, int part) { return sums_[i % 16 / kPartSize + part]; }

  Doubles sums_[16 / kPartSize] = {};
};
