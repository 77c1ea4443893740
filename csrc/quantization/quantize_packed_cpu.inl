// The loops of quantize_packed: the groups of a row are measured, then rounded a few lines at a
// time.
#include "common/simd/sum.inl"
#include "quantization/quantize_measure.inl"

constexpr int64_t kBytesAtOnce = 2048;  // elements, whole lines, whose codes are bytes for a while

struct ErrorsOfRow {
  bool wanted;
  uint32_t largest = 0;  // the bits of a float: so NaN wins
  double squares = 0;
};

// Rounds neighbours in a group: `bytes` gets their codes.
template <int kBits, class T, class Coding>
DSX_INLINE void round_to_bytes(const Coding& coding, const T* x, int64_t count,
                               const ScaleAndOffset& scale, uint32_t sign, uint8_t* bytes,
                               ErrorsOfRow& errors) {
  const Grid grid = grid_of(scale, Coding::kAsymmetric);
  const Ints mask(grid.mask & ((1u << kBits) - 1));
  Ints largest(0u);
  Sum16 squares;
  for_each_vector(0, count, [&](int64_t i, int lanes) DSX_INLINED {
    const Vec value = Vec::load(x + i, lanes);
    const Ints encoded = coding.template encode<Ints>(value, grid);
    ((encoded & mask) ^ Ints(sign)).store(bytes + i, lanes);
    if (!errors.wanted) return;
    const Vec position = position_of(value, grid, Coding::kAsymmetric);
    Vec rest = rest_of(position, coding.template number_of<Vec>(encoded), grid);
    if (lanes < Vec::size) rest = select(lane_numbers() < Vec(float(lanes)), rest, Vec(0.0f));
    largest = max(largest, magnitude_of(bits_of(rest)));
    squares.add_square(rest, i, lanes);
  });
  if (!errors.wanted) return;
  const float relative = dsx::float_of(max_of(largest)) * grid.inverse;
  errors.largest = dsx::max(errors.largest, magnitude_of(dsx::bits_of(relative)));
  errors.squares += squares.total();
}

typedef uint8_t Sixteen __attribute__((vector_size(16)));

inline Sixteen load_sixteen(const uint8_t* source) {
  Sixteen bytes;
  memcpy(&bytes, source, sizeof(bytes));
  return bytes;
}

// Puts the codes of whole runs, a byte each, in the order of packed_weight.h: of two eights that
// follow each other, as bytes or as nibbles of them, bytes alternate.
template <int kBits>
DSX_INLINE void pack_runs(const uint8_t* bytes, int64_t count, uint8_t* target) {
  constexpr int64_t kRun = kRunBytes * 8 / kBits;
  for (int64_t i = 0; i < count; i += kRun, target += kRunBytes) {
    Sixteen both = load_sixteen(bytes + i);
    if constexpr (kBits == 4) {
      const Sixteen next = load_sixteen(bytes + i + 16);
      const Sixteen low = __builtin_shufflevector(both, next, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18,
                                                  19, 20, 21, 22, 23);
      const Sixteen high = __builtin_shufflevector(both, next, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25,
                                                   26, 27, 28, 29, 30, 31);
      both = low | high << 4;
    }
    both =
        __builtin_shufflevector(both, both, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    memcpy(target, &both, sizeof(both));
  }
}

template <int kBits, class T, class Coding>
inline void quantize_packed_row(const QuantizePacked& call, const Coding& coding, int64_t row) {
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const T* x = call.x.row<T>(row).address;
  for (int64_t column = 0; column < call.columns(); ++column) {
    const int64_t i = column * call.group;
    Largest found;
    measure(x + i, least(call.group, call.length - i), Coding::kAsymmetric, found);
    store_scale(call, call.place_of_scale(column, row), scale_of(coding, found));
  }
  ErrorsOfRow errors{call.errors != nullptr};
  const uint32_t sign = sign_of_packed(call.format, Coding::kAsymmetric);
  const int padding = int(packed_padding(call.format));
  const int64_t padded = call.padded_length();
  uint8_t bytes[kBytesAtOnce];
  for (int64_t begin = 0; begin < padded; begin += kBytesAtOnce) {
    const int64_t end = least(begin + kBytesAtOnce, padded), end_of_row = least(end, call.length);
    int64_t i = begin;
    while (i < end_of_row) {
      const int64_t column = i / call.group;
      const int64_t end_of_piece = least((column + 1) * call.group, end_of_row);
      const ScaleAndOffset scale = stored_scale(call, call.place_of_scale(column, row));
      round_to_bytes<kBits>(coding, x + i, end_of_piece - i, scale, sign, bytes + (i - begin),
                            errors);
      i = end_of_piece;
    }
    memset(bytes + (i - begin), padding, size_t(end - i));
    pack_runs<kBits>(bytes, end - begin, call.codes + row * call.row_bytes + begin * kBits / 8);
  }
  if (!errors.wanted) return;
  call.errors[row * kRowErrors] = double(dsx::float_of(errors.largest));
  // Of a format with an offset, positions are halves.
  call.errors[row * kRowErrors + 1] = (Coding::kAsymmetric ? 4 : 1) * errors.squares;
}

inline void quantize_packed_rows(const QuantizePacked& call, int64_t begin, int64_t end) {
  with_storage_type(call.x.dtype, [&](auto storage) {
    using T = decltype(storage);
    with_packed_coding(call.format, call.asymmetric, [&](const auto& coding, auto bits) {
      for (int64_t row = begin; row < end; ++row) {
        quantize_packed_row<decltype(bits)::value, T>(call, coding, row);
      }
    });
  });
  if (end < call.rows) return;
  for (int64_t column = 0; column < call.columns(); ++column) {
    for (int64_t row = call.rows; row < call.padded_rows(); ++row) {
      store_scale(call, call.place_of_scale(column, row), {0, 0});
    }
  }
}
