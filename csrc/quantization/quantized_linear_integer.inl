// The same for rows of x that are rounded to 8-bit codes: dot products of bytes, exact, by Dots, of
// which there may be better ones than those of an instruction set.

constexpr int kHalves = DSX_BITS == 4 ? 2 : 1;  // vectors of bytes that a unit of codes makes
constexpr int kRowsOfBytes = Vec::size == kLanes && Vec::registers == 1 ? 4 : 2;  // most at once
constexpr int64_t kSegments = 512;  // that are at hand, times rows of x

// The scale of a row of x, and what its elements are rounded to.
struct RowGrid {
  float scale;
  Grid grid;
};

inline RowGrid grid_of_row(const QuantizedLinear& call, int64_t row) {
  const Pointer<Any> source = call.x.row<Any>(row);
  Ints largest(0u);
  for_each_vector(0, call.length, [&](int64_t i, int lanes) {
    largest = max(largest, magnitude_of(bits_of(Vec::load(source + i, lanes))));
  });
  const LargestCode most(QuantFormat::int8, false);
  const ScaleAndOffset found = symmetric_scale(max_of(largest), most);
  return {found.scale, grid_of(found, false)};
}

// Whether a unit has several groups, each of whole runs: then each run has a sum of its own.
inline bool adds_up_runs(const PackedWeight& weight) {
  return weight.groups() > 1 && weight.group % kUnit != 0 && weight.group % kRun == 0;
}

inline int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Some rows of a part of x as codes, in the order of the bytes that they are multiplied with. A
// group, or kExactLength elements of it, is a piece. What a piece has of a unit is a segment: with
// zeros in the place of other elements, but where runs have sums of their own. So it has one or
// more sums, each of several segments, or of a run.
template <int kRows>
class CodesOfX {
 public:
  static constexpr int64_t kMost = kSegments / kRows;

  int64_t segments, sums;  // at hand
  int64_t end;             // element behind the last one
  bool begun;              // the piece of the first sum has begun before
  int64_t unit[kMost];     // of each segment
  bool ends_sum[kMost];
  bool ends_piece[4 * kMost];  // of each sum
  int64_t group[4 * kMost];
  uint32_t of_x[4 * kMost][kRows];  // the sum of the codes of the piece, as far as it has come
  alignas(64) uint32_t words[kMost][kHalves][kRows][kLanes];

  // From element k on, as many as there is room for; all that is before has been read just before.
  void read(const QuantizedLinear& call, const RowGrid* grids, int64_t first, int64_t k) {
    if (first == first_ && k == k_) return;
    first_ = first, k_ = k;
    begun = k > 0 && !ends_piece[sums - 1];
    if (!begun) memset(running_, 0, sizeof(running_));
    segments = sums = 0;
    const PackedWeight& weight = call.weight;
    const bool runs = adds_up_runs(weight);
    for (end = k; end < call.length && segments < kMost; ++segments) {
      const int64_t here = end, at = here / kUnit;
      if (segments == 0 || at != unit[segments - 1]) round_unit(call, grids, at);
      unit[segments] = at;
      const int64_t of_unit = least_of((at + 1) * kUnit, call.length);
      if (runs) {
        end = of_unit;
        copy_words(0, kUnit);
        for (int run = 0; run < 4; ++run) add_sum(weight, at * kUnit + run * kRun);
      } else {
        end = least_of(of_unit, end_of_piece(weight, here));
        copy_words(here - at * kUnit, end == call.length ? kUnit : end - at * kUnit);
        add_codes(0, kLanes);
        ends_sum[segments] = end == end_of_piece(weight, here);
        if (ends_sum[segments] || end == call.length || segments + 1 == kMost) {
          finish_sum(here / weight.group, ends_sum[segments]);
          ends_sum[segments] = true;
        }
      }
    }
  }

 private:
  static int64_t end_of_piece(const PackedWeight& weight, int64_t here) {
    const int64_t start = here / weight.group * weight.group;
    const int64_t piece = start + ((here - start) / kExactLength + 1) * kExactLength;
    return least_of(piece, least_of(start + weight.group, weight.length));
  }

  // Of the run that begins at this element; behind the end of a row there are zeros.
  void add_sum(const PackedWeight& weight, int64_t here) {
    add_codes(int(here % kUnit / kRun) * 4, 4);
    const int64_t known = least_of(here, weight.length - 1);
    finish_sum(known / weight.group, here + kRun >= end_of_piece(weight, known));
  }

  void finish_sum(int64_t number, bool ends) {
    group[sums] = number;
    ends_piece[sums] = ends;
    memcpy(of_x[sums], running_, sizeof(running_));
    if (ends) memset(running_, 0, sizeof(running_));
    ++sums;
  }

  void add_codes(int lane, int count) {
    for (int r = 0; r < kRows; ++r) {
      for (int h = 0; h < kHalves; ++h) {
        for (int i = lane; i < lane + count; ++i) {
          const uint32_t word = words[segments][h][r][i];
          for (int shift = 0; shift < 32; shift += 8) {
            running_[r] += uint32_t(int8_t(word >> shift));
          }
        }
      }
    }
  }

  // Those of elements [begin, end) of the unit.
  void copy_words(int64_t begin, int64_t end) {
    for (int h = 0; h < kHalves; ++h) {
      memcpy(words[segments][h], rounded_[h], sizeof(rounded_[h]));
      if (end - begin == kUnit) continue;
      for (int lane = 0; lane < kLanes; ++lane) {
        uint32_t mask = 0;
        for (int j = 0; j < 4; ++j) {
          const int64_t i = place_of(j * kHalves + h, lane);
          mask |= i >= begin && i < end ? 0xffu << 8 * j : 0;
        }
        for (int r = 0; r < kRows; ++r) words[segments][h][r][lane] &= mask;
      }
    }
  }

  void round_unit(const QuantizedLinear& call, const RowGrid* grids, int64_t at) {
    const int64_t count = least_of(kUnit, call.length - at * kUnit);
    memset(rounded_, 0, sizeof(rounded_));
    for (int r = 0; r < kRows && first_ + r < call.rows; ++r) {
      const Grid& grid = grids[first_ + r].grid;
      float natural[kUnit], ordered[kUnit];
      load_unit(call.x.row<Any>(first_ + r) + at * kUnit, count, natural);
      put_in_order(natural, ordered, kLanes);
      for (int p = 0; p < kParts; ++p) {
        for (int h = 0; h < kHalves; ++h) {
          Ints four(0u);  // codes of each word, the last one first
          for (int j = 3; j >= 0; --j) {
            const float* const source = ordered + (j * kHalves + h) * kLanes + p * Vec::size;
            const Vec x = Vec::load(source, Vec::size);
            const Ints code = bits_of(round_to_grid<Ints>(x, grid, Vec(grid.half), kIntegers));
            four = shift_left<8>(four) | (code & Ints(grid.mask & 0xff));
          }
          memcpy(rounded_[h][r] + p * Vec::size, &four, sizeof(four));
        }
      }
    }
  }

  uint32_t rounded_[kHalves][kRows][kLanes];
  uint32_t running_[kRows];
  int64_t first_ = -1, k_ = -1;
};

template <int kRows>
struct IntegerScratch {
  CodesOfX<kRows> x;
  uint32_t begun[kRows * kColumns];  // sums of a piece that goes on
  alignas(64) uint32_t sums[kRoom];  // of add_dots
};

// All sums at hand for four rows of the weight: target[sum * pitch + row of the weight], those of a
// row of x after those of the one before.
template <bool kRuns, int kRows>
inline void add_dots(const uint8_t* const (&rows)[4], int64_t ahead, int64_t pitch,
                     const CodesOfX<kRows>& x, uint32_t* target) {
  Ints sums[kRows][4][kParts];
  const auto clear = [&]() DSX_INLINED {
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < 4; ++c) {
        for (int p = 0; p < kParts; ++p) sums[r][c][p] = Ints(0u);
      }
    }
  };
  clear();
  for (int64_t s = 0; s < x.segments; ++s) {
    for (int c = 0; c < 4; ++c) {
      const uint8_t* const here = rows[c] + x.unit[s] * kUnitBytes;
      if (s == 0 || x.unit[s] != x.unit[s - 1]) prefetch(here, ahead);
      for (int p = 0; p < kParts; ++p) {
        Ints words = Codes::prepared(load_words(here + p * 4 * Vec::size));
        for (int h = 0; h < kHalves; ++h) {
          const Ints codes = kHalves == 1 ? words : words & Ints(0x0f0f0f0fu);
          for (int r = 0; r < kRows; ++r) {
            Ints of_x;
            memcpy(&of_x, x.words[s][h][r] + p * Vec::size, sizeof(of_x));
            sums[r][c][p] = Dots::add<DSX_BITS>(sums[r][c][p], codes, of_x);
          }
          words = shift_right<4>(words);
        }
      }
    }
    if (!kRuns && !x.ends_sum[s]) continue;
    for (int r = 0; r < kRows; ++r) {
      uint32_t* const of_row = target + r * x.sums * pitch;
      kRuns ? store_sums_of_fours(sums[r], of_row, pitch) : store_lane_sums(sums[r], of_row);
    }
    target += (kRuns ? 4 : 1) * pitch;
    clear();
  }
}

// Adds what the sums at hand are worth to totals[r * kColumns + column]. `sums` is what add_dots
// has found; `begun`, [r * kColumns + column], what there is of a piece that has not ended.
template <int kRows>
inline void add_pieces(const PackedWeight& weight, const CodesOfX<kRows>& x, int64_t first,
                       int64_t columns, int64_t pitch, uint32_t* sums, uint32_t* begun,
                       float* totals) {
  const uint32_t zero =
      DSX_BITS == 4 ? 8 : 128;  // by which codes with a sign are more than they are
  for (int r = 0; r < kRows; ++r) {
    bool has_begun = x.begun;
    for (int64_t i = 0; i < x.sums; ++i, sums += pitch) {
      if (has_begun) {
        for (int64_t c = 0; c < columns; ++c) sums[c] += begun[r * kColumns + c];
      }
      has_begun = !x.ends_piece[i];
      if (has_begun) {
        memcpy(begun + r * kColumns, sums, size_t(columns) * sizeof(*sums));
        continue;
      }
      const uint32_t of_x = x.of_x[i][r], less = weight.offsets ? 0 : zero * of_x;
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
template <bool kRuns, int kRows>
inline void add_chunk(const PackedWeight& weight, int64_t first, int64_t columns,
                      IntegerScratch<kRows>& scratch, float* totals) {
  const CodesOfX<kRows>& x = scratch.x;
  const int64_t most = kRoom / (kRows * x.sums) / 4 * 4;  // columns that there is room for
  for (int64_t begin = 0; begin < columns; begin += most) {
    const int64_t here = least_of(columns - begin, most), pitch = (here + 3) / 4 * 4;
    for (int64_t c = 0; c < here; c += 4) {
      const uint8_t* rows[4];
      for (int64_t i = 0; i < 4; ++i) {  // nobody looks at the sums of those that are not there
        const int64_t row = first + begin + (c + i < here ? c + i : c);
        rows[i] = weight.codes + row * weight.row_bytes;
      }
      add_dots<kRuns, kRows>(rows, 4 * weight.row_bytes, pitch, x, scratch.sums + c);
    }
    add_pieces<kRows>(weight, x, first + begin, here, pitch, scratch.sums, scratch.begun + begin,
                      totals + begin);
  }
}

template <int kRows>
inline void integer_rows(const QuantizedLinear& call, int64_t begin, int64_t end) {
  RowGrid grids[kMostRows];
  for (int64_t row = 0; row < call.rows; ++row) grids[row] = grid_of_row(call, row);
  IntegerScratch<kRows> scratch;
  const bool runs = adds_up_runs(call.weight);
  for_each_block(call, begin, end, [&](int64_t first, int64_t columns, float* totals) {
    for (int64_t row = 0; row < call.rows; row += kRows) {
      float sums[kRows * kColumns] = {};
      for (int64_t k = 0; k < call.length; k = scratch.x.end) {
        scratch.x.read(call, grids, row, k);
        if (runs) {
          add_chunk<true, kRows>(call.weight, first, columns, scratch, sums);
        } else {
          add_chunk<false, kRows>(call.weight, first, columns, scratch, sums);
        }
      }
      for (int r = 0; r < kRows && row + r < call.rows; ++r) {
        float* const target = totals + (row + r) * kColumns;
        for (int64_t c = 0; c < columns; ++c) {
          target[c] = grids[row + r].scale * sums[r * kColumns + c];
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
