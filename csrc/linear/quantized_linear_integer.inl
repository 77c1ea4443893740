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
  const Pointer<Any> source = call.row_of_x<Any>(row);
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

// How many segments each of the sums at hand has: any number, one, or a run of one.
enum class Sums { any, of_one, of_runs };

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

  // From element k on, as many as fit; all that is before has been read just before.
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
      uint32_t sums[kLanes];
      for (int p = 0; p < kParts; ++p) {
        Ints sum(0u);
        for (int h = 0; h < kHalves; ++h) {
          const Ints four = Ints::load_words(words[segments][h][r] + p * Vec::size);
          sum = Dots::add<DSX_BITS>(sum, Ints(0x01010101u), four);
        }
        memcpy(sums + p * Vec::size, &sum, sizeof(sum));
      }
      for (int i = lane; i < lane + count; ++i) running_[r] += sums[i];
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
      load_unit(call.row_of_x<Any>(first_ + r) + at * kUnit, count, natural);
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
  alignas(64) uint32_t begun[kRows * kColumns];  // sums of a piece that goes on
};

// As many rows of the weight as a vector has lanes, from number `first` on: each lane adds up one
// of them, and the scales of a group are one load. Of those that are not there, the first one
// stands in the place, and nobody looks at their sums.
struct Panel {
  const PackedWeight& weight;
  int64_t first;
  int lanes;  // rows that there are
  const uint8_t* rows[kLanes];

  Panel(const PackedWeight& of, int64_t row, int64_t left)
      : weight(of), first(row), lanes(int(least_of(left, kLanes))) {
    for (int i = 0; i < kLanes; ++i) {
      rows[i] = weight.codes + (first + (i < lanes ? i : 0)) * weight.row_bytes;
    }
  }

  // Scales or offsets of a group.
  Vec at(const float* values, int64_t group, int part) const {
    const int left = lanes - part * Vec::size;
    const float* source = values + group * weight.scale_pitch + first + part * Vec::size;
    return left < 1 ? Vec(0.0f) : Vec::load(source, left < Vec::size ? left : Vec::size);
  }
};

// The dot products of four rows of the weight with the segments of a sum, or with all runs of one,
// from segment s on: as sums_of_fours has them, of each row of x. Returns the segment behind them.
template <Sums kSums, int kRows>
DSX_INLINE int64_t dots_of_fours(const uint8_t* const* rows, int64_t ahead,
                                 const CodesOfX<kRows>& x, int64_t s,
                                 Ints (&fours)[kRows][kParts]) {
  Ints sums[kRows][4][kParts];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < 4; ++c) {
      for (int p = 0; p < kParts; ++p) sums[r][c][p] = Ints(0u);
    }
  }
  bool ends;
  do {
    const int64_t at = x.unit[s] * kUnitBytes;
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const uint8_t* const here = rows[c] + at;
      prefetch_early(here, ahead);
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        Ints words = Codes::prepared(Ints::load_words(here + p * 4 * Vec::size));
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) {
          const Ints codes = kHalves == 1 ? words : words & Ints(0x0f0f0f0fu);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const Ints of_x = Ints::load_words(x.words[s][h][r] + p * Vec::size);
            sums[r][c][p] = Dots::add<DSX_BITS>(sums[r][c][p], codes, of_x);
          }
          words = shift_right<4>(words);
        }
      }
    }
    ends = kSums != Sums::any || x.ends_sum[s];
    ++s;
  } while (!ends);
  for (int r = 0; r < kRows; ++r) sums_of_fours(sums[r], fours[r]);
  return s;
}

// What becomes of sum number i with row r of x: the piece goes on, or it is worth something.
template <int kRows>
DSX_INLINE void add_sum(const Panel& panel, const CodesOfX<kRows>& x, int64_t i, int r,
                        const Ints (&sum)[kParts], Ints (&begun)[kParts], Vec (&totals)[kParts]) {
  const PackedWeight& weight = panel.weight;
  for (int p = 0; p < kParts; ++p) begun[p] = begun[p] + sum[p];
  if (!x.ends_piece[i]) return;
  // Codes with a sign are more than they are by this.
  const uint32_t zero = DSX_BITS == 4 ? 8 : 128;
  const uint32_t of_x = x.of_x[i][r], less = weight.offsets ? 0 : zero * of_x;
  for (int p = 0; p < kParts; ++p) {
    const Vec scale = panel.at(weight.scales, x.group[i], p);
    totals[p] = multiply_add(scale, signed_numbers(begun[p] - Ints(less)), totals[p]);
    if (weight.offsets) {
      const Vec offset = panel.at(weight.offsets, x.group[i], p);
      totals[p] = multiply_add(offset, Vec(float(int32_t(of_x))), totals[p]);
    }
    begun[p] = Ints(0u);
  }
}

// Adds what the sums at hand are worth to totals[r * kColumns + row of the panel]; begun, of the
// same places, has what there is of a piece that has not ended. Four rows go through registers at a
// time, as many as fit there; written out, so that what they leave stays in registers too.
template <Sums kSums, int kRows>
inline void add_panel(const Panel& panel, const CodesOfX<kRows>& x, uint32_t* begun,
                      float* totals) {
  const int64_t ahead = ahead_of(panel.weight.row_bytes, kLanes);
  Ints pieces[kRows][kParts];
  Vec sums[kRows][kParts];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kParts; ++p) {
      const int64_t at = r * kColumns + p * Vec::size;
      pieces[r][p] = Ints(0u);
      if (x.begun) pieces[r][p] = Ints::load_words(begun + at);
      sums[r][p] = Vec::load(totals + at, Vec::size);
    }
  }
  for (int64_t i = 0, s = 0; i < x.sums; i += kSums == Sums::of_runs ? 4 : 1) {
    Ints fours[4][kRows][kParts];
    const float* const scales = panel.weight.scales + x.group[i] * panel.weight.scale_pitch;
    prefetch_early(scales + panel.first, kLanes * sizeof(float));
    int64_t end = s;
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      end = dots_of_fours<kSums, kRows>(panel.rows + 4 * q, ahead, x, s, fours[q]);
    }
    s = end;
    for (int r = 0; r < kRows; ++r) {
      Ints found[4][kParts], by_quarter[4][kParts];
      for (int q = 0; q < 4; ++q) {
        for (int p = 0; p < kParts; ++p) found[q][p] = fours[q][r][p];
      }
      transpose_quarters(found, by_quarter);
      if (kSums == Sums::of_runs) {
        for (int f = 0; f < 4; ++f) {
          add_sum<kRows>(panel, x, i + f, r, by_quarter[f], pieces[r], sums[r]);
        }
        continue;
      }
      Ints all[kParts];
      for (int p = 0; p < kParts; ++p) {
        all[p] = by_quarter[0][p] + by_quarter[1][p] + (by_quarter[2][p] + by_quarter[3][p]);
      }
      add_sum<kRows>(panel, x, i, r, all, pieces[r], sums[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kParts; ++p) {
      const int64_t at = r * kColumns + p * Vec::size;
      memcpy(begun + at, &pieces[r][p], sizeof(pieces[r][p]));
      sums[r][p].store(totals + at, Vec::size);
    }
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
        for (int64_t c = 0; c < columns; c += kLanes) {
          const Panel panel(call.weight, first + c, columns - c);
          uint32_t* const begun = scratch.begun + c;
          if (runs) {
            add_panel<Sums::of_runs, kRows>(panel, scratch.x, begun, sums + c);
          } else if (scratch.x.sums == scratch.x.segments) {
            add_panel<Sums::of_one, kRows>(panel, scratch.x, begun, sums + c);
          } else {
            add_panel<Sums::any, kRows>(panel, scratch.x, begun, sums + c);
          }
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
