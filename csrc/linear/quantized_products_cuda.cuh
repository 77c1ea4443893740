// The products of quantized_linear on CUDA, of a warp: a tile of rows of codes beside all rows of
// x, line by line as they lie in shared memory, by tensor cores. Codes become pairs of 16 bits,
// exactly; groups are added up by themselves, and then times their scales.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "linear/few_rows_cuda.cuh"
#include "common/cuda/mma.cuh"
#include "linear/quantized_linear.h"

namespace dsx::cuda {

// (word & mask) | bits, in one instruction.
template <uint32_t mask, uint32_t bits>
__device__ inline uint32_t masked(uint32_t word) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "n"(mask), "n"(bits));
  return result;
}

// What body makes of words that are pairs of T.
template <class T, class Body, class... Words>
__device__ inline uint32_t of_pairs(const Body& body, const Words&... words) {
  constexpr bool kBrain = T::kQuietNan == BFloat16::kQuietNan;
  using Pair = std::conditional_t<kBrain, __nv_bfloat162, __half2>;
  const Pair value = body(reinterpret_cast<const Pair&>(words)...);
  uint32_t result;
  memcpy(&result, &value, sizeof(result));
  return result;
}
template <class T>
__device__ inline uint32_t difference(uint32_t a, uint32_t b) {
  return of_pairs<T>([](auto x, auto y) { return __hsub2(x, y); }, a, b);
}
template <class T>
__device__ inline uint32_t product_and(uint32_t a, uint32_t factor, uint32_t other) {
  return of_pairs<T>([](auto x, auto y, auto z) { return __hfma2(x, y, z); }, a, factor, other);
}

// Pair number n of a word of packed codes, as packed_weight.h draws them. The exponent of 128, or
// of 1024, is put in front of the bits of a code: it then stands for so much more.
template <int kBits, class T>
__device__ inline uint32_t pair_of(uint32_t word, int n) {
  constexpr bool kBrain = T::kQuietNan == BFloat16::kQuietNan;
  word >>= n * kBits;
  if constexpr (kBits == 4) {
    constexpr uint32_t kFront = kBrain ? 0x43004300 : 0x64006400;
    return difference<T>(masked<0x000f000f, kFront>(word), kFront | 0x00080008);
  } else if constexpr (kBrain) {  // of 7 bits behind the front: the last one counts as -128
    return difference<T>(masked<0x007f007f, 0x43004300>(word),
                         masked<0x00800080, 0x43004300>(word));
  } else {
    return difference<T>(masked<0x00ff00ff, 0x64006400>(word ^ 0x00800080), 0x64806480);
  }
}

// The same pair, of codes of 4 bits in fewer instructions: one shift serves two pairs, of which the
// second stays 4 bits higher. Behind an exponent of bfloat16 there is no room for that: with none,
// codes stand for 2^129 times less, most of them subnormal numbers. No factor is large enough to
// make more than a quarter of a code of them, so all pairs are quarters. All of it is exact.
template <int kBits, class T>
constexpr float kCodeOfFraction = kBits == 4 && T::kQuietNan == BFloat16::kQuietNan ? 4 : 1;

template <int kBits, class T>
__device__ inline uint32_t fractions_of(uint32_t word, int n) {
  if constexpr (kBits == 4) {
    word >>= n / 2 * 8;
    if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
      if (n % 2 == 0) {  // 128 + code, by 1 / 4, less 34
        return product_and<T>(masked<0x000f000f, 0x43004300>(word), 0x3e803e80, 0xc208c208);
      }
      // code / 2^129, by 2^127, less 2
      return product_and<T>(word & 0x00f000f0, 0x7f007f00, 0xc000c000);
    } else {
      if (n % 2 == 0) return pair_of<kBits, T>(word, 0);
      // 1024 + 16 code, by 1 / 16, less 72
      return product_and<T>(masked<0x00f000f0, 0x64006400>(word), 0x2c002c00, 0xd480d480);
    }
  } else {
    return pair_of<kBits, T>(word, n);
  }
}

// What the order of groups is beside that of lines; a group is a part of a line, or some lines.
template <int kBits>
inline bool groups_fit_lines(const PackedWeight& weight) {
  constexpr int64_t kLine = kLineBytes * 8 / kBits, kRun = kUnitBytes * 8 / kBits;
  if (weight.group >= weight.length || weight.group % kLine == 0) return true;
  return weight.group >= kRun && kLine % weight.group == 0;
}

template <int kBits>
inline Scales scales_of(const PackedWeight& weight) {
  constexpr int64_t kLine = kLineBytes * 8 / kBits;
  Scales scales{
      weight.scales, weight.offsets, weight.groups(), weight.scale_pitch, 1, kUnitsOfLine, 1};
  if (weight.group >= weight.length) {
    scales.group_lines = INT32_MAX;
  } else if (weight.group < kLine) {
    scales.line_parts = int(kLine / weight.group);
    scales.part_units = kUnitsOfLine / scales.line_parts;
  } else {
    scales.group_lines = int(std::min<int64_t>(weight.group / kLine, INT32_MAX));
  }
  return scales;
}

// A call with what is worked out of it before the launch.
struct CodesCall : QuantizedLinear {
  Scales scales;
};

// Where a lane finds the scales, or offsets, of its two rows of a tile among those that are near.
class LaneScales {
 public:
  // Those of `columns` rows are side by side; those of the others, if there are two boxes, and the
  // offsets of each box come behind.
  __device__ LaneScales(const Geometry& geometry, int boxes, int columns, int first_row)
      : columns_(columns) {
    offsets_ = unsigned(boxes * geometry.scale_step);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + int(threadIdx.x) % kWarp / 4 + 8 * half;
      const int box = row >= columns;
      places_[half] = unsigned(geometry.scale_place + box * geometry.scale_step +
                               (row - box * columns) * int(sizeof(float)));
    }
  }

  // Of a group, whose number among those that are near is `group`.
  __device__ unsigned of_group(unsigned near, int group) const {
    return near + unsigned(group * columns_ * int(sizeof(float)));
  }
  __device__ unsigned next_part(unsigned of_part) const { return of_group(of_part, 1); }
  __device__ void load(float (&scales)[2], unsigned of_part) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) scales[half] = load_shared(of_part + places_[half]);
  }
  __device__ void load_offsets(float (&offsets)[2], unsigned of_part) const {
    load(offsets, of_part + offsets_);
  }

 private:
  const int columns_;
  unsigned offsets_, places_[2];
};

// The same of any groups, in the part of a stage that has them.
class ScalePlaces : public LaneScales {
 public:
  __device__ ScalePlaces(const Scales& scales, const Geometry& geometry, const WeightRows& rows,
                         int first_row)
      : LaneScales(geometry, rows.parts, rows.columns, first_row), scales_(scales) {}

  // Of a line, that share a scale: 1, 2, 4 or 8.
  __device__ int units() const { return scales_.part_units; }

  // Of line l of a stage, which is that number of the weight; from its first part on.
  __device__ unsigned of_line(unsigned near, int l, int number) const {
    return of_group(near, scales_.group_lines == 1
                              ? l * scales_.line_parts
                              : scales_.group_of(number) - scales_.group_of(number - l));
  }

 private:
  const Scales& scales_;
};

// Where a lane finds what tensor cores multiply of x: blocks of 32 bytes of each row, four in a
// line.
template <int kColumnTiles>
class FactorPlaces {
 public:
  __device__ explicit FactorPlaces(const Geometry& geometry) : x_rows_(unsigned(geometry.x_rows)) {
    const int lane = threadIdx.x % kWarp;
    // Of one column tile, both words of two blocks; of two, those of one.
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      const int row = kColumnTiles == 1 ? 0 : ::min(j * 16 + lane / 16 * 8, geometry.x_rows - 8);
      const int unit = kColumnTiles == 1 ? lane / 8 : lane / 8 % 2;
      places_[j] = unsigned(geometry.x_place + place_in_tma_tile(row + lane % 8, unit));
    }
  }

  // From line to line: known to the compiler where there can be no more than these rows.
  __device__ unsigned step() const {
    return unsigned(kLineBytes) * (kColumnTiles > 2 ? x_rows_ : kColumnTiles * kColumnTile);
  }

  // Of block number `block` from a line on, as number i of some; of one column tile those of even
  // numbers load the next ones, too.
  template <int kCount>
  __device__ void load(uint32_t (&factors)[kCount][kColumnTiles][2], unsigned line, int block,
                       int i) const {
    uint32_t words[4];
    line += unsigned(block / 4) * step();
    const unsigned unit = unsigned(block % 4 * 2 * kUnitBytes);
    if constexpr (kColumnTiles > 1) {
#pragma unroll
      for (int j = 0; j < kReads; ++j) {
        load_matrices<false>(words, line + (places_[j] ^ unit));
#pragma unroll
        for (int k = 0; k < 4; ++k) factors[i][2 * j + k / 2][k % 2] = words[k];
      }
    } else if (i % 2 == 0) {
      load_matrices<false>(words, line + (places_[0] ^ unit));
#pragma unroll
      for (int k = 0; k < 4; ++k) factors[i + k / 2][0][k % 2] = words[k];
    }
  }

 private:
  static constexpr int kReads = kColumnTiles == 1 ? 1 : kColumnTiles / 2;

  const unsigned x_rows_;
  unsigned places_[kReads];
};

// Sums of a tile beside kColumnTiles times 8 rows of x, in the order that multiply_matrices has.
// Places has what LaneScales has. kLean: with few registers, and so with little of x ahead of the
// products.
template <class T, int kBits, int kColumnTiles, bool kAsymmetric, class Places, bool kLean>
class CodeSums {
 public:
  static constexpr int kSums = kColumnTiles * 4;

  // The row of the weight that this lane loads is that line of those near.
  __device__ CodeSums(const Geometry& geometry, const Places& scales, int line)
      : scales_(scales),
        factors_(geometry),
        weight_place_(unsigned(place_in_tma_tile(line, int(threadIdx.x) % kWarp / kTileRows))) {
    clear();
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) totals_[i] = 0;
  }
  __device__ void copy_sums(float (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = totals_[i] * kCodeOfFraction<kBits, T>;
  }

  static constexpr int kXLines = 16 / kBits;
  // Units that are added up before they become part of the totals, at most: 128 elements.
  static constexpr int kMostUnits = kBits == 4 ? 4 : 8;

  // Of line l of those near.
  __device__ unsigned x_of_line(unsigned near, int l) const {
    return near + unsigned(l * kXLines) * factors_.step();
  }
  __device__ const Places& scales() const { return scales_; }

  // Adds the products of a line. Instructions are read from memory, too, so there are not too many
  // of them. Of long parts two are worked on at a time, as a product takes long after the one that
  // it is added to.
  template <int kPartUnits, bool kOwnScale>
  __device__ void add_line(unsigned weight, unsigned x, unsigned of_part) {
    constexpr int kParts = kColumnTiles <= kMostOfTwo && 2 * kPartUnits == kUnitsOfLine ? 2 : 1;
#pragma unroll(kPartUnits < 4 ? 1 : 2)
    for (int first = 0; first < kUnitsOfLine; first += kParts * kPartUnits) {
      Group groups[kParts];
#pragma unroll
      for (Group& group : groups) {
        scales_.load(group.scale, of_part);
        if (kAsymmetric) scales_.load_offsets(group.offset, of_part);
        if (kOwnScale) of_part = scales_.next_part(of_part);
      }
      add_parts<kPartUnits>(weight, x, first, groups);
    }
  }

 private:
  static constexpr int kBlocks = 8 / kBits;  // of 16 products each, of a unit
  // Blocks whose x is asked for before the first product waits for any.
  static constexpr int kAhead = 8 / kColumnTiles * kBlocks;
  // Up to so many column tiles two parts are worked on at a time.
  static constexpr int kMostOfTwo = kLean ? 2 : 1;

  // What is added up before it becomes part of the totals, beside both rows' scales and offsets.
  struct Group {
    float sums[kColumnTiles][4] = {}, sums_of_x[kColumnTiles][4] = {};
    float scale[2], offset[2];
  };

  // Products of a part are added up in their order, whatever kColumnTiles is.
  template <int kPartUnits, int kParts>
  __device__ void add_parts(unsigned weight, unsigned x, int first, Group (&groups)[kParts]) {
    uint32_t words[kParts][(kPartUnits + 1) / 2][4];  // rows 0 to 7 and 8 to 15 of a unit, the next
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < (kPartUnits + 1) / 2; ++i) {
        const int unit = (kPartUnits == 1 ? first & ~1 : first) + part * kPartUnits + 2 * i;
        load_matrices<false>(words[part][i],
                             weight + (weight_place_ ^ unsigned(unit * kUnitBytes)));
      }
    }
    constexpr int kCount = kPartUnits * kBlocks, kMost = kLean ? 2 : kAhead / kParts;
    constexpr int kStep = kMost < kCount ? kMost : kCount;
    constexpr int kTurns = kLean && kStep < kCount ? 2 : 1;  // the next ones come meanwhile
    uint32_t turns[kTurns][kParts][(kStep + 1) / 2 * 2][kColumnTiles][2];
    const auto load = [&](int from) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int begin = (first + part * kPartUnits) * kBlocks + from;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          factors_.load(turns[from / kStep % kTurns][part], x, begin + i, i);
        }
      }
    };
    if (kTurns > 1) load(0);
#pragma unroll
    for (int from = 0; from < kCount; from += kStep) {
      const int next = kTurns > 1 ? from + kStep : from;
      if (next < kCount) load(next);
      const auto& factors = turns[from / kStep % kTurns];
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const int unit = (from + i) / kBlocks, block = (from + i) % kBlocks;
        const bool odd = kPartUnits == 1 ? first % 2 : unit % 2;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const uint32_t (&pair)[4] = words[part][unit / 2];
          multiply_block(groups[part], odd ? pair[2] : pair[0], odd ? pair[3] : pair[1], block,
                         factors[part][i]);
        }
      }
    }
#pragma unroll
    for (const Group& group : groups) add_to_totals(group);
  }

  __device__ void add_to_totals(const Group& group) {
    constexpr float kZero = (kBits == 4 ? 8.0f : 128.0f) / kCodeOfFraction<kBits, T>;
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& total = totals_[j * 4 + i];
        float sum = group.sums[j][i];
        if (kAsymmetric) {
          sum = __fmaf_rn(kZero, group.sums_of_x[j][i], sum);
          const float offset = group.offset[i / 2] / kCodeOfFraction<kBits, T>;
          total = __fmaf_rn(offset, group.sums_of_x[j][i], total);
        }
        total = __fmaf_rn(group.scale[i / 2], sum, total);
      }
    }
  }

  // Of block number i of a unit of both rows.
  __device__ static void multiply_block(Group& group, uint32_t low, uint32_t high, int i,
                                        const uint32_t (&factors)[kColumnTiles][2]) {
    constexpr uint32_t kOne = T::kQuietNan == BFloat16::kQuietNan ? 0x3f803f80 : 0x3c003c00;
    const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
    const uint32_t tile[4] = {
        fractions_of<kBits, T>(low, 2 * i), fractions_of<kBits, T>(high, 2 * i),
        fractions_of<kBits, T>(low, 2 * i + 1), fractions_of<kBits, T>(high, 2 * i + 1)};
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      multiply_matrices<T>(group.sums[j], tile, factors[j]);
      if (kAsymmetric) multiply_matrices<T>(group.sums_of_x[j], ones, factors[j]);
    }
  }

  const Places scales_;
  const FactorPlaces<kColumnTiles> factors_;
  const unsigned weight_place_;
  float totals_[kSums];
};

// The same of codes that lie in stages, beside x and scales of any groups.
template <class T, int kBits, int kColumnTiles, bool kAsymmetric>
class CodeProducts : public CodeSums<T, kBits, kColumnTiles, kAsymmetric, ScalePlaces, false> {
  using Base = CodeSums<T, kBits, kColumnTiles, kAsymmetric, ScalePlaces, false>;

 public:
  static constexpr bool kInOrder = false;
  static constexpr bool kFillsRegisters = kColumnTiles > 2;

  __device__ CodeProducts(const CodesCall& call, const Geometry& geometry, const WeightRows& rows,
                          int first_row)
      : Base(geometry, ScalePlaces(call.scales, geometry, rows, first_row),
             rows.line(geometry, first_row + int(threadIdx.x) % kTileRows)),
        weight_step_(unsigned(rows.columns * kLineBytes)),
        lines_(int(ceil_div(call.weight.row_bytes, int64_t(kLineBytes)))) {}

  // Adds the products of line l of a stage, which is that number of the weight. There is code for
  // each number of units that share a scale, so that nothing in it depends on a condition.
  __device__ void add(const char* stage, int l, int number) {
    if (number >= lines_) return;  // of the last split-K parts: zeros
    const unsigned near = shared_address(stage);
    const unsigned of_line = this->scales().of_line(near, l, number);
    const unsigned weight = near + unsigned(l) * weight_step_, x = this->x_of_line(near, l);
    switch (this->scales().units()) {
      case 1: return this->template add_line<1, true>(weight, x, of_line);
      case 2: return this->template add_line<2, true>(weight, x, of_line);
      case 4: return this->template add_line<4, true>(weight, x, of_line);
      default: return this->template add_line<Base::kMostUnits, false>(weight, x, of_line);
    }
  }

 private:
  const unsigned weight_step_;  // from line to line
  const int lines_;             // of the weight
};

// The same of groups of 128, where x and scales stay near, and a tile of the weight lies by itself.
template <class T, int kBits, int kColumnTiles, bool kAsymmetric>
class CodesOf128 : public CodeSums<T, kBits, kColumnTiles, kAsymmetric, LaneScales, true> {
  using Base = CodeSums<T, kBits, kColumnTiles, kAsymmetric, LaneScales, true>;

 public:
  static constexpr int kGroups = kUnitsOfLine / Base::kMostUnits;  // of a line

  __device__ CodesOf128(const Geometry& geometry, const LaneScales& scales)
      : Base(geometry, scales, int(threadIdx.x) % kTileRows) {}

  // Adds the products of line l of those near.
  __device__ void add(unsigned weight, unsigned near, int l) {
    this->template add_line<Base::kMostUnits, true>(weight, this->x_of_line(near, l),
                                                    this->scales().of_group(near, l * kGroups));
  }
};

}  // namespace dsx::cuda
