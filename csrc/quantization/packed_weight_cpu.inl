// A packed weight in SIMD registers, as numbers and as floats. DSX_BITS, of a code, is 4 or 8.

constexpr int kLanes = 16;  // words that are worked on in a go, whatever the width of Vec
constexpr int kParts = kLanes / Vec::size;
constexpr int kInWord = 32 / DSX_BITS;              // codes
constexpr int64_t kRun = kRunBytes * 8 / DSX_BITS;  // elements
constexpr int64_t kUnitBytes = 4 * kLanes;
constexpr int64_t kUnit = 4 * kRun;  // elements of a unit, which is four runs

// Which element of a unit has code number `step` of word number `lane`.
constexpr int place_of(int step, int lane) {
  return lane / 4 * int(kRun) + element_of_run(DSX_BITS, lane % 4, step);
}

typedef float Four __attribute__((vector_size(16)));

// Puts the elements of a unit into the order of codes: `step` after `step`, `pitch` floats apart.
inline void put_in_order(const float* natural, float* target, int64_t pitch) {
  constexpr int half = kInWord / 2;
  for (int run = 0; run < 4; ++run) {
    for (int step = 0; step < half; ++step) {
      Four first, second;
      memcpy(&first, natural + place_of(step, 4 * run), sizeof(first));
      memcpy(&second, natural + place_of(step, 4 * run + 2), sizeof(second));
      const Four even = __builtin_shufflevector(first, second, 0, 2, 4, 6);
      const Four odd = __builtin_shufflevector(first, second, 1, 3, 5, 7);
      memcpy(target + step * pitch + 4 * run, &even, sizeof(even));
      memcpy(target + (step + half) * pitch + 4 * run, &odd, sizeof(odd));
    }
  }
}

// The opposite, of steps that lie one after the other.
inline void put_back(const float (&ordered)[kUnit], float* natural) {
  constexpr int half = kInWord / 2;
  for (int run = 0; run < 4; ++run) {
    for (int step = 0; step < half; ++step) {
      Four even, odd;
      memcpy(&even, ordered + step * kLanes + 4 * run, sizeof(even));
      memcpy(&odd, ordered + (step + half) * kLanes + 4 * run, sizeof(odd));
      const Four first = __builtin_shufflevector(even, odd, 0, 4, 1, 5);
      const Four second = __builtin_shufflevector(even, odd, 2, 6, 3, 7);
      memcpy(natural + place_of(step, 4 * run), &first, sizeof(first));
      memcpy(natural + place_of(step, 4 * run + 2), &second, sizeof(second));
    }
  }
}

// The floats of `count` elements of a row, and zeros behind them to the end of a unit.
inline void load_unit(Pointer<Any> source, int64_t count, float (&floats)[kUnit]) {
  if (count < kUnit) memset(floats, 0, sizeof(floats));
  for_each_vector(0, count, [&](int64_t i, int lanes) {
    Vec::load(source + i, lanes).store(floats + i, lanes);
  });
}

// Codes as numbers, which are exact.
#if DSX_BITS == 4
class Codes {
 public:
  explicit Codes(const float* numbers) : table_(numbers) {}

  static Ints prepared(Ints words) { return words; }
  // Of the lowest bits of each word.
  Vec operator()(Ints words) const { return table_[words]; }

  // Writes those of all codes, of which a Codes reads.
  static void list(const PackedWeight& weight, float (&numbers)[16]) {
    const int zero = weight.offsets ? 0 : 8;
    for (int code = 0; code < 16; ++code) {
      const bool is_level = weight.format == QuantFormat::nf4;
      numbers[code] = is_level ? nf4_level(code) : float(code - zero);
    }
  }

 private:
  Lookup table_;
};
#else
class Codes {
 public:
  explicit Codes(const float* numbers) : least_(numbers[0] - 0x1p23f) {}

  // Codes are signed: as bytes without sign they are 128 more.
  static Ints prepared(Ints words) { return words ^ Ints(0x80808080u); }
  Vec operator()(Ints words) const {
    return float_of(blend_bits(Ints(0xffu), words, Ints(0x4b000000u))) + least_;
  }

  // The least one is enough.
  static void list(const PackedWeight& weight, float (&numbers)[16]) {
    numbers[0] = weight.offsets ? 0.0f : -128.0f;
  }

 private:
  Vec least_;  // less 2^23, which has the exponent that is put before a byte
};
#endif

// The numbers of whole units, in the order of the elements.
inline void numbers_of(const Codes& codes, const uint8_t* source, int64_t units, float* target) {
  for (int64_t u = 0; u < units; ++u) {
    float numbers[kUnit];
    for (int p = 0; p < kParts; ++p) {
      Ints words = Codes::prepared(Ints::load_words(source + u * kUnitBytes + p * 4 * Vec::size));
      for (int step = 0; step < kInWord; ++step) {
        codes(words).store(numbers + step * kLanes + p * Vec::size, Vec::size);
        words = shift_right<DSX_BITS>(words);
      }
    }
    put_back(numbers, target + u * kUnit);
  }
}

// Elements of a row of the weight, from number k on, which is a multiple of kUnit. Fills whole
// units.
inline void elements_of_row(const PackedWeight& weight, const Codes& codes, int64_t row, int64_t k,
                            int64_t count, float* target) {
  const uint8_t* source = weight.codes + row * weight.row_bytes + k * DSX_BITS / 8;
  numbers_of(codes, source, (count + kUnit - 1) / kUnit, target);
  for (int64_t i = 0; i < count;) {
    const int64_t group = (k + i) / weight.group, at = group * weight.scale_pitch + row;
    const int64_t end =
        (group + 1) * weight.group - k < count ? (group + 1) * weight.group - k : count;
    const Vec scale(weight.scales[at]);
    for_each_vector(i, end, [&](int64_t j, int lanes) {
      const Vec number = Vec::load(target + j, lanes);
      const Vec element =
          weight.offsets ? multiply_add(number, scale, Vec(weight.offsets[at])) : number * scale;
      element.store(target + j, lanes);
    });
    i = end;
  }
}

inline void unpack_rows(const PackedWeight& weight, const Rows& out, int64_t begin, int64_t end) {
  constexpr int64_t kChunk = 2048;
  float numbers[16], floats[kChunk];
  Codes::list(weight, numbers);
  const Codes codes(numbers);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t k = 0; k < weight.length; k += kChunk) {
      const int64_t count = weight.length - k < kChunk ? weight.length - k : kChunk;
      elements_of_row(weight, codes, row, k, count, floats);
      const Pointer<Any> target = out.row<Any>(row) + k;
      for_each_vector(0, count, [&](int64_t i, int lanes) {
        Vec::load(floats + i, lanes).store(target + i, lanes);
      });
    }
  }
}
