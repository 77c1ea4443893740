// The loops of quantized_linear over a range of columns: a few rows of the weight at a time go
// through registers, each beside a few rows of x, which are in the cache as floats, in the order of
// the codes.
#include "common/activation_math.inl"
#include "linear/few_rows_cpu.inl"
#include "quantization/packed_weight_cpu.inl"
#include "quantization/quantize_math.inl"

constexpr int kMostAtOnce = Vec::size == kLanes && Vec::registers == 1 ? 8 : 4;  // rows of x
constexpr int64_t kScratchFloats = 16384;  // floats of x that are at hand, and scales of the weight

// Whether all elements of a run have the same scale.
inline bool has_whole_runs(const PackedWeight& weight) {
  return weight.groups() == 1 || weight.group % kRun == 0;
}

// Some rows of a chunk of x, with zeros behind it and rows of zeros behind them. kept are those of
// the last call: of a call with few rows, all of them.
template <int kRows>
class FactorsOfX {
 public:
  static constexpr int64_t kChunk = kScratchFloats / kRows;

  // Lanes number i of elements `step` of a unit, or elements 16 step + i of it, of one row.
  const float* at(int64_t unit, int step, int row) const {
    return floats_ + ((unit * kInWord + step) * kRows + row) * kLanes;
  }
  // The sum of all that `at` has for a unit, lane by lane.
  const float* sums_at(int64_t unit, int row) const {
    return sums_ + (unit * kRows + row) * kLanes;
  }

  void read(const QuantizedLinear& call, int64_t first, int64_t k, int64_t count, bool in_order) {
    if (first == first_ && k == k_) return;
    first_ = first, k_ = k;
    for (int64_t u = 0; u * kUnit < count; ++u) {
      for (int r = 0; r < kRows; ++r) {
        float natural[kUnit] = {};
        const int64_t left = count - u * kUnit;
        if (first + r < call.rows) {
          const Pointer<Any> source = call.row_of_x<Any>(first + r) + (k + u * kUnit);
          load_unit(source, left < kUnit ? left : kUnit, natural);
        }
        place(u, r, natural, in_order);
        if (call.weight.offsets) add_up(u, r);
      }
    }
  }

 private:
  static constexpr int64_t kPitch = kRows * kLanes;  // from a step of a row to the next one

  void place(int64_t unit, int row, const float (&natural)[kUnit], bool in_order) {
    float* const target = floats_ + (unit * kInWord * kRows + row) * kLanes;
    if (!in_order) return put_in_order(natural, target, kPitch);
    for (int step = 0; step < kInWord; ++step) {
      memcpy(target + step * kPitch, natural + step * kLanes, kLanes * sizeof(float));
    }
  }

  void add_up(int64_t unit, int row) {
    for (int p = 0; p < kParts; ++p) {
      Vec sum(0.0f);
      for (int step = 0; step < kInWord; ++step) {
        sum = sum + Vec::load(at(unit, step, row) + p * Vec::size, Vec::size);
      }
      sum.store(sums_ + (unit * kRows + row) * kLanes + p * Vec::size, Vec::size);
    }
  }

  alignas(64) float floats_[kScratchFloats];
  alignas(64) float sums_[kScratchFloats / kInWord];
  int64_t first_ = -1, k_ = -1;
};

// The scales of some columns for a chunk, or their offsets: a row for each unit, or for each run.
struct ScalesAtHand {
  const float* values;  // null: none
  int64_t pitch;        // from one row to the next
  int64_t in_unit;      // rows: 1 or 4

  Vec at(int64_t unit, int column, int part) const {
    const float* source = values + unit * in_unit * pitch + column;
    return in_unit == 1 ? Vec(*source) : load_fours(source, pitch, part);
  }
};

inline int64_t scales_of_unit(const PackedWeight& weight) {
  return weight.groups() == 1 || weight.group % kUnit == 0 ? 1 : 4;
}

// Copies `columns` of these, which are the scales or offsets of the weight, from number `first` on:
// those of `units` from element k on. Some lie 4096 bytes apart or a multiple of that, so that they
// would push each other out of the cache.
inline ScalesAtHand copy_scales(const PackedWeight& weight, const float* values, int64_t first,
                                int64_t columns, int64_t k, int64_t units, float* target) {
  if (values == nullptr) return {};
  const int64_t in_unit = scales_of_unit(weight), last = weight.groups() - 1;
  for (int64_t i = 0; i < units * in_unit; ++i) {
    const int64_t group = (k + i * (kUnit / in_unit)) / weight.group;
    const int64_t known = group < last ? group : last;  // behind the end numbers are 0
    const float* const source = values + known * weight.scale_pitch + first;
    for (int64_t c = 0; c < columns; c += kLanes) {
      prefetch_early(source + c, columns * int64_t(sizeof(float)));
    }
    memcpy(target + i * columns, source, size_t(columns) * sizeof(float));
  }
  return {target, columns, in_unit};
}

// What a thread has at hand. The running sums of a result are those of the words that have the same
// place in their units.
template <int kRows>
struct Scratch {
  FactorsOfX<kRows> x;
  alignas(64) float scales[kScratchFloats];
  alignas(64) float offsets[kScratchFloats];
  alignas(64) float sums[kRows][kColumns][kLanes];
};

// `units` of kColumns_ rows of the weight beside kRows rows of x; `column` is the number of the
// first one among those whose scales are at hand. What does not change is in locals: the compiler
// takes it that a vector may be stored anywhere. The registers of codes come by reference: by value
// clang 14 puts 512 bits where they are not aligned.
template <int kColumns_, int kRows>
inline void multiply(const Codes& shared_codes, const uint8_t* source, int64_t pitch, int64_t ahead,
                     int64_t units, int column, const ScalesAtHand scales,
                     const ScalesAtHand offsets, const FactorsOfX<kRows>& x,
                     float (*target)[kColumns][kLanes]) {
  const Codes codes = shared_codes;
  for (int64_t u = 0; u < units; ++u) {
    const uint8_t* const here = source + u * kUnitBytes;
#pragma GCC unroll 8
    for (int c = 0; c < kColumns_; ++c) prefetch_early(here + c * pitch, ahead);
    for (int p = 0; p < kParts; ++p) {
      Ints words[kColumns_];
      Vec sums[kColumns_][kRows];
#pragma GCC unroll 8
      for (int c = 0; c < kColumns_; ++c) {
        words[c] = Codes::prepared(Ints::load_words(here + c * pitch + p * 4 * Vec::size));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[c][r] = Vec(0.0f);
      }
      for (int step = 0; step < kInWord; ++step) {
        Vec numbers[kColumns_];
#pragma GCC unroll 8
        for (int c = 0; c < kColumns_; ++c) {
          numbers[c] = codes(words[c]);
          words[c] = shift_right<DSX_BITS>(words[c]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Vec factor = Vec::load(x.at(u, step, r) + p * Vec::size, Vec::size);
#pragma GCC unroll 8
          for (int c = 0; c < kColumns_; ++c) {
            sums[c][r] = multiply_add(numbers[c], factor, sums[c][r]);
          }
        }
      }
#pragma GCC unroll 8
      for (int c = 0; c < kColumns_; ++c) {
        const Vec scale = scales.at(u, column + c, p);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          float* const lanes = target[r][column + c] + p * Vec::size;
          multiply_add(sums[c][r], scale, Vec::load(lanes, Vec::size)).store(lanes, Vec::size);
        }
        if (offsets.values == nullptr) continue;
        const Vec offset = offsets.at(u, column + c, p);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          float* const lanes = target[r][column + c] + p * Vec::size;
          const Vec of_x = Vec::load(x.sums_at(u, r) + p * Vec::size, Vec::size);
          multiply_add(of_x, offset, Vec::load(lanes, Vec::size)).store(lanes, Vec::size);
        }
      }
    }
  }
}

// How many rows of the weight go through registers at a time, beside so many rows of x: each has a
// sum for each of these.
constexpr int at_once(int rows) {
  if (rows == 1) return Vec::size == kLanes ? 4 : 2;
  return kMostAtOnce == 8 ? 2 : 1;
}

// Elements [k, k + count) of `columns` rows of the weight, from number `first` on, where a group
// ends within a run: these are made floats, one row at a time, in the memory of the scales.
template <int kRows>
inline void multiply_floats(const PackedWeight& weight, const Codes& codes, int64_t first,
                            int64_t columns, int64_t k, int64_t count, Scratch<kRows>& scratch) {
  float* const elements = scratch.scales;
  for (int64_t c = 0; c < columns; ++c) {
    elements_of_row(weight, codes, first + c, k, count, elements);
    for (int64_t u = 0; u * kUnit < count; ++u) {
      for (int p = 0; p < kParts; ++p) {
        for (int r = 0; r < kRows; ++r) {
          float* const lanes = scratch.sums[r][c] + p * Vec::size;
          Vec total = Vec::load(lanes, Vec::size);
          for (int step = 0; step < kInWord; ++step) {
            const int64_t i = p * Vec::size;
            total = multiply_add(Vec::load(elements + u * kUnit + step * kLanes + i, Vec::size),
                                 Vec::load(scratch.x.at(u, step, r) + i, Vec::size), total);
          }
          total.store(lanes, Vec::size);
        }
      }
    }
  }
}

// The products of `columns` rows of the weight, whose scales are at hand, with rows of x.
template <int kRows>
inline void multiply_chunk(const PackedWeight& weight, const Codes& codes, int64_t first,
                           int64_t columns, int64_t k, int64_t count, Scratch<kRows>& scratch) {
  constexpr int kStep = at_once(kRows);
  const int64_t units = (count + kUnit - 1) / kUnit;
  const ScalesAtHand scales =
      copy_scales(weight, weight.scales, first, columns, k, units, scratch.scales);
  const ScalesAtHand offsets =
      copy_scales(weight, weight.offsets, first, columns, k, units, scratch.offsets);
  const int64_t pitch = weight.row_bytes, ahead = ahead_of(weight.row_bytes, kStep);
  const uint8_t* source = weight.codes + first * pitch + k * DSX_BITS / 8;
  int c = 0;
  for (; c + kStep <= columns; c += kStep) {
    multiply<kStep, kRows>(codes, source + c * pitch, pitch, ahead, units, c, scales, offsets,
                           scratch.x, scratch.sums);
  }
  for (; c < columns; ++c) {
    multiply<1, kRows>(codes, source + c * pitch, pitch, ahead, units, c, scales, offsets,
                       scratch.x, scratch.sums);
  }
}

// The sums of rows [row, row + kRows) of x, those that are there, for `columns` rows of the weight:
// totals[row * kColumns + column].
template <int kRows>
inline void sums_of_rows(const QuantizedLinear& call, const Codes& codes, int64_t row,
                         int64_t first, int64_t columns, Scratch<kRows>& scratch, float* totals) {
  const PackedWeight& weight = call.weight;
  const bool whole_runs = has_whole_runs(weight);
  memset(scratch.sums, 0, sizeof(scratch.sums));
  for (int64_t k = 0; k < call.length; k += scratch.x.kChunk) {
    const int64_t left = call.length - k;
    const int64_t count = left < scratch.x.kChunk ? left : scratch.x.kChunk;
    scratch.x.read(call, row, k, count, !whole_runs);
    if (whole_runs) {
      multiply_chunk<kRows>(weight, codes, first, columns, k, count, scratch);
    } else {
      multiply_floats<kRows>(weight, codes, first, columns, k, count, scratch);
    }
  }
  for (int r = 0; r < kRows && row + r < call.rows; ++r) {
    for (int64_t c = 0; c < columns; c += 4) {
      Vec lanes[4][kParts];
      for (int i = 0; i < 4; ++i) {
        for (int p = 0; p < kParts; ++p) {
          lanes[i][p] = Vec::load(scratch.sums[r][c + i] + p * Vec::size, Vec::size);
        }
      }
      store_lane_sums(lanes, totals + (row + r) * kColumns + c);
    }
  }
}

template <int kRows>
inline void multiply_rows(const QuantizedLinear& call, int64_t begin, int64_t end) {
  const PackedWeight& weight = call.weight;
  float numbers[16];
  Codes::list(weight, numbers);
  const Codes codes(numbers);
  Scratch<kRows> scratch;
  const int64_t chunk = call.length < scratch.x.kChunk ? call.length : scratch.x.kChunk;
  const int64_t scales = (chunk + kUnit - 1) / kUnit * scales_of_unit(weight);
  const int64_t narrow =
      scales * kColumns <= kScratchFloats ? kColumns : kScratchFloats / scales / 4 * 4;
  for_each_block(call, begin, end, [&](int64_t first, int64_t columns, float* totals) {
    for (int64_t c = 0; c < columns; c += narrow) {
      const int64_t here = columns - c < narrow ? columns - c : narrow;
      for (int64_t row = 0; row < call.rows; row += kRows) {
        sums_of_rows<kRows>(call, codes, row, first + c, here, scratch, totals + c);
      }
    }
  });
}

// Rows that are not there are zeros; nobody looks at their sums.
inline void multiply_columns(const QuantizedLinear& call, int64_t begin, int64_t end) {
  if (call.rows > 4) return multiply_rows<kMostAtOnce>(call, begin, end);
  if (call.rows > 2) return multiply_rows<4>(call, begin, end);
  if (call.rows == 2) return multiply_rows<2>(call, begin, end);
  multiply_rows<1>(call, begin, end);
}

#include "linear/quantized_linear_integer.inl"
