// A packed weight in SIMD registers, as numbers and as floats. DSX_BITS, of a code, is 4 or 8.

constexpr int kLanes = 16;  // words that are worked on in a go, whatever the width of Vec
constexpr int kParts = kLanes / Vec::size;
constexpr int kInWord = 32 / DSX_BITS;              // codes
constexpr int64_t kRun = kRunBytes * 8 / DSX_BITS;  // elements
constexpr int64_t kUnitBytes = 4 * kLanes;
constexpr int64_t kUnit = 4 * kRun;  // elements of a unit, which is four runs

// Which element of a unit has code number `step` of word number `lane`.
constexpr int place_of(int step, int lane) {
  constexpr int half = kInWord / 2;
  return lane / 4 * int(kRun) + 8 * (step % half) + step / half + lane % 4 * 2;
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
  Table table_;
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

inline Ints load_words(const uint8_t* source) {
  Ints words;
  memcpy(&words, source, sizeof(words));
  return words;
}

// The numbers of whole units, in the order of the elements.
inline void numbers_of(const Codes& codes, const uint8_t* source, int64_t units, float* target) {
  for (int64_t u = 0; u < units; ++u) {
    float numbers[kInWord][kLanes];
    for (int p = 0; p < kParts; ++p) {
      Ints words = Codes::prepared(load_words(source + u * kUnitBytes + p * 4 * Vec::size));
      for (int step = 0; step < kInWord; ++step) {
        codes(words).store(numbers[step] + p * Vec::size, Vec::size);
        words = shift_right<DSX_BITS>(words);
      }
    }
    for (int step = 0; step < kInWord; ++step) {
      for (int lane = 0; lane < kLanes; ++lane) {
        target[u * kUnit + place_of(step, lane)] = numbers[step][lane];
      }
    }
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
