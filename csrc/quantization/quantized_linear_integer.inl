// The same for rows of x that are rounded to 8-bit codes: dot products of bytes, exact, by Dots, of
// which there may be better ones than those of an instruction set.

constexpr int kHalves = DSX_BITS == 4 ? 2 : 1;  // vectors of bytes that a unit of codes makes
constexpr int kRowsOfBytes = Vec::size == kLanes && Vec::registers == 1 ? 4 : 2;  // most at once
constexpr int64_t kSegments = 512;  // that are at hand, times rows of x

inline Grid grid_of_row(const QuantizedLinear& call, int64_t row) {
  const Pointer<Any> source = call.x.row<Any>(row);
  Ints largest(0u);
  for_each_vector(0, call.length, [&](int64_t i, int lanes) {
    largest = max(largest, magnitude_of(bits_of(Vec::load(source + i, lanes))));
  });
  const float most = largest_code(QuantFormat::int8, false);
  return grid_of(symmetric_scale(max_of(largest), most), false);
}

// Some rows of a part of x as codes, cut into segments: what of a unit belongs to one group, or to
// one part of kExactLength elements of it, which is called a piece; with zeros in the place of the
// others.
template <int kRows>
class CodesOfX {
 public:
  static constexpr int64_t kMost = kSegments / kRows;

  int64_t segments, pieces;  // at hand
  int64_t end;               // element behind the last one
  bool begun, open;          // the first piece began before; the last one goes on
  int64_t unit[kMost];
  bool is_last[kMost];          // of its piece
  int64_t group[kMost];         // of each piece
  uint32_t sums[kMost][kRows];  // of codes of each piece
  alignas(64) uint8_t bytes[kMost][kHalves][kRows][kUnitBytes];

  // From element k on, as many as there is room for; all that is before has been read just before.
  void read(const QuantizedLinear& call, const Grid* grids, int64_t first, int64_t k) {
    if (first == first_ && k == k_) return;
    first_ = first, k_ = k;
    begun = k > 0 && open;
    for (int r = 0; r < kRows; ++r) sums[0][r] = begun ? sums[pieces - 1][r] : 0;
    segments = pieces = 0;
    open = false;
    for (end = k; end < call.length && segments < kMost;) {
      const int64_t here = end, at = here / kUnit;
      if (segments == 0 || at != unit[segments - 1]) round_unit(call, grids, at);
      add_segment(call.weight, here, at);
    }
    pieces += open;
  }

 private:
  void add_segment(const PackedWeight& weight, int64_t here, int64_t at) {
    const int64_t number = here / weight.group, start = number * weight.group;
    const int64_t of_group = ends_at(start + weight.group, weight.length);
    const int64_t of_piece =
        ends_at(start + ((here - start) / kExactLength + 1) * kExactLength, of_group);
    end = ends_at((at + 1) * kUnit, of_piece);
    unit[segments] = at;
    is_last[segments] = end == of_piece;
    group[pieces] = number;
    for (int r = 0; r < kRows; ++r) place(r, int(here - at * kUnit), int(end - at * kUnit));
    ++segments;
    open = end != of_piece;
    pieces += !open;
    if (!open && pieces < kMost) memset(sums[pieces], 0, sizeof(sums[pieces]));
  }

  static int64_t ends_at(int64_t a, int64_t b) { return a < b ? a : b; }

  // Elements of a unit from number `begin` on, in the order of the bytes that they are multiplied
  // with.
  void place(int row, int begin, int end) {
    for (int h = 0; h < kHalves; ++h) {
      for (int byte = 0; byte < kUnitBytes; ++byte) {
        const int i = place_of(byte % 4 * kHalves + h, byte / 4);
        bytes[segments][h][row][byte] = i >= begin && i < end ? rounded_[row][i] : 0;
      }
    }
    for (int i = begin; i < end; ++i) sums[pieces][row] += uint32_t(int8_t(rounded_[row][i]));
  }

  void round_unit(const QuantizedLinear& call, const Grid* grids, int64_t at) {
    const int64_t left = call.length - at * kUnit, count = left < kUnit ? left : kUnit;
    memset(rounded_, 0, sizeof(rounded_));
    for (int r = 0; r < kRows && first_ + r < call.rows; ++r) {
      const Grid& grid = grids[first_ + r];
      const Pointer<Any> source = call.x.row<Any>(first_ + r) + at * kUnit;
      for_each_vector(0, count, [&](int64_t i, int lanes) {
        const Vec x = Vec::load(source + i, lanes);
        const Ints code = bits_of(round_to_grid<Ints>(x, grid, Vec(grid.half), kIntegers));
        (code & Ints(grid.mask)).store(rounded_[r] + i, lanes);
      });
    }
  }

  uint8_t rounded_[kRows][kUnit];
  int64_t first_ = -1, k_ = -1;
};

template <int kRows>
struct IntegerScratch {
  CodesOfX<kRows> x;
  uint32_t begun[kRows * kColumns];  // sums of a piece that goes on
  alignas(64) uint32_t sums[kRoom];  // [row][piece][column]
};

// The sums of all pieces at hand for four rows of the weight.
template <int kRows>
inline void add_dots(const uint8_t* const (&rows)[4], int64_t ahead, int64_t row_pitch,
                     int64_t piece_pitch, const CodesOfX<kRows>& x, uint32_t* target) {
  const Ints zero(0u);
  Ints sums[kRows][4][kParts];
  const auto clear = [&]() DSX_INLINED {
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < 4; ++c) {
        for (int p = 0; p < kParts; ++p) sums[r][c][p] = zero;
      }
    }
  };
  clear();
  for (int64_t s = 0; s < x.segments; ++s) {
    for (int c = 0; c < 4; ++c) {
      const uint8_t* const here = rows[c] + x.unit[s] * kUnitBytes;
      if (s == 0 || x.unit[s] != x.unit[s - 1]) prefetch(here, ahead);
      for (int p = 0; p < kParts; ++p) {
        const int64_t at = p * 4 * Vec::size;
        Ints words = Codes::prepared(load_words(here + at));
        for (int h = 0; h < kHalves; ++h) {
          const Ints codes = kHalves == 1 ? words : words & Ints(0x0f0f0f0fu);
          for (int r = 0; r < kRows; ++r) {
            sums[r][c][p] =
                Dots::add<DSX_BITS>(sums[r][c][p], codes, load_words(x.bytes[s][h][r] + at));
          }
          words = shift_right<4>(words);
        }
      }
    }
    if (x.is_last[s] || s + 1 == x.segments) {
      for (int r = 0; r < kRows; ++r) store_lane_sums(sums[r], target + r * row_pitch);
      target += piece_pitch;
      clear();
    }
  }
}

// Adds what the pieces at hand are worth to totals[r * kColumns + column]. `sums` has those of
// [row][piece][column], rows of `pitch`; `begun` those of a piece that began before, or goes on.
template <int kRows>
inline void add_pieces(const PackedWeight& weight, const CodesOfX<kRows>& x, int64_t first,
                       int64_t columns, int64_t pitch, uint32_t* sums, uint32_t* begun,
                       float* totals) {
  const uint32_t zero =
      DSX_BITS == 4 ? 8 : 128;  // by which codes with a sign are more than they are
  for (int r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < x.pieces; ++i, sums += pitch) {
      const uint32_t of_x = x.sums[i][r], less = weight.offsets ? 0 : zero * of_x;
      if (x.begun && i == 0) {
        for (int64_t c = 0; c < columns; ++c) sums[c] += begun[r * kColumns + c];
      }
      if (x.open && i + 1 == x.pieces) {
        memcpy(begun + r * kColumns, sums, size_t(columns) * sizeof(*sums));
        continue;
      }
      float numbers[kColumns];
      for (int64_t c = 0; c < columns; ++c) numbers[c] = float(int32_t(sums[c] - less));
      const int64_t at = x.group[i] * weight.scale_pitch + first;
      for_each_vector(0, columns, [&](int64_t c, int lanes) {
        float* const target = totals + r * kColumns + c;
        const Vec scale = Vec::load(weight.scales + at + c, lanes);
        Vec total = multiply_add(scale, Vec::load(numbers + c, lanes), Vec::load(target, lanes));
        if (weight.offsets) {
          const Vec offset = Vec::load(weight.offsets + at + c, lanes);
          total = multiply_add(offset, Vec(float(int32_t(of_x))), total);
        }
        total.store(target, lanes);
      });
    }
  }
}

// Adds the sums of a chunk for `columns` rows of the weight, from number `first` on.
template <int kRows>
inline void add_chunk(const PackedWeight& weight, int64_t first, int64_t columns,
                      IntegerScratch<kRows>& scratch, float* totals) {
  const CodesOfX<kRows>& x = scratch.x;
  const int64_t most = kRoom / (kRows * x.pieces) / 4 * 4;  // columns that there is room for
  for (int64_t begin = 0; begin < columns; begin += most) {
    const int64_t here = columns - begin < most ? columns - begin : most;
    const int64_t pitch = (here + 3) / 4 * 4;
    for (int64_t c = 0; c < here; c += 4) {
      const uint8_t* rows[4];
      for (int64_t i = 0; i < 4; ++i) {  // nobody looks at the sums of those that are not there
        const int64_t row = first + begin + (c + i < here ? c + i : c);
        rows[i] = weight.codes + row * weight.row_bytes;
      }
      add_dots<kRows>(rows, 4 * weight.row_bytes, x.pieces * pitch, pitch, x, scratch.sums + c);
    }
    add_pieces<kRows>(weight, x, first + begin, here, pitch, scratch.sums, scratch.begun + begin,
                      totals + begin);
  }
}

template <int kRows>
inline void integer_rows(const QuantizedLinear& call, int64_t begin, int64_t end) {
  Grid grids[kMostRows];
  for (int64_t row = 0; row < call.rows; ++row) grids[row] = grid_of_row(call, row);
  IntegerScratch<kRows> scratch;
  for_each_block(call, begin, end, [&](int64_t first, int64_t columns, float* totals) {
    for (int64_t row = 0; row < call.rows; row += kRows) {
      float sums[kRows * kColumns] = {};
      for (int64_t k = 0; k < call.length; k = scratch.x.end) {
        scratch.x.read(call, grids, row, k);
        add_chunk<kRows>(call.weight, first, columns, scratch, sums);
      }
      for (int r = 0; r < kRows && row + r < call.rows; ++r) {
        float* const target = totals + (row + r) * kColumns;
        for (int64_t c = 0; c < columns; ++c) {
          target[c] = grids[row + r].step * sums[r * kColumns + c];
        }
      }
    }
  });
}

inline void multiply_columns_of_integers(const QuantizedLinear& call, int64_t begin, int64_t end) {
  if (call.rows > 2) return integer_rows<kRowsOfBytes>(call, begin, end);
  if (call.rows == 2) return integer_rows<2>(call, begin, end);
  integer_rows<1>(call, begin, end);
}
