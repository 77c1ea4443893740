// The products of quantized_linear on CUDA by integers, of a warp: a tile of rows of codes beside
// all rows of x as bytes, line by line as they lie in shared memory, by tensor cores. Groups are
// added up by themselves, which is exact, and then times their scales, one after the other.
#pragma once

#include "linear/quantized_any_cuda.cuh"
#include "linear/quantized_products_cuda.cuh"

namespace dsx::cuda {

// A call with what is worked out of it before the launch.
struct IntegersCall : CodesCall {
  RowsOfBytes bytes;
};

// Whether tensor cores take it: they add up 32 elements at a time.
inline bool fits_integers(const PackedWeight& weight) {
  const int64_t most = std::min(weight.group, weight.length);
  return groups_fit_lines<DSX_BITS>(weight) && weight.group >= 32 && most <= kExactLength;
}

// Sums of a tile beside kColumnTiles times 8 rows of x, in the order that multiply_bytes has.
template <int kColumnTiles_>
class IntegerTiles {
 public:
  static constexpr int kColumnTiles = kColumnTiles_, kSums = kColumnTiles * 4;
  static constexpr bool kInOrder = true;
  static constexpr bool kFillsRegisters = false;

  __device__ IntegerTiles(const IntegersCall& call, const Geometry& geometry,
                          const WeightRows& rows, int first_row)
      : call_(call),
        scales_(call.scales, geometry, rows, first_row),
        factors_(geometry),
        weight_step_(unsigned(rows.columns * kLineBytes)),
        first_x_(rows.share.first),
        rows_of_x_(rows.share.rows),
        asymmetric_(call.weight.offsets != nullptr) {
    const int lane = threadIdx.x % kWarp;
    const int line = rows.line(geometry, first_row + lane % kTileRows);
    weight_place_ = unsigned(place_in_tma_tile(line, lane / kTileRows));
    lines_ = int(call.weight.row_bytes / kLineBytes);
    left_ = call.scales.group_lines;
    clear();
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) totals_[i] = 0;
    clear_group();
  }

  // Times the scales of the rows of x, which the kernel before this one has found.
  __device__ void copy_sums(float (&sums)[kSums]) const {
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int row = i / 4 * kColumnTile + int(threadIdx.x) % 4 * 2 + i % 2;
      sums[i] = row < rows_of_x_ ? totals_[i] * call_.bytes.scales[first_x_ + row] : 0;
    }
  }

  // Adds the products of line l of a stage, which is that number of the weight. There is code for
  // each number of units that share a scale, so that nothing in it depends on a condition.
  __device__ void add(const char* stage, int l, int number) {
    if (number >= lines_) return;
    const unsigned near = shared_address(stage);
    const unsigned of_line = scales_.of_line(near, l, number);
    switch (scales_.units()) {
      case 1: return add_groups<kUnitsOfBlock>(near, l, of_line);  // of 4 bits only
      case 2: return add_groups<2>(near, l, of_line);
      case 4: return add_groups<4>(near, l, of_line);
      default: break;
    }
    add_units<kUnitsOfLine>(near, l, 0);
    if (--left_ > 0 && number + 1 < lines_) return;
    left_ = call_.scales.group_lines;
    end_group(of_line);
  }

 private:
  static constexpr int kUnitsOfBlock = DSX_BITS / 4;  // of 32 codes
  static constexpr int kXLines = 8 / DSX_BITS;

  // Group by group: instructions are read from memory, too, so there are not too many of them.
  template <int kUnits>
  __device__ void add_groups(unsigned near, int l, unsigned of_group) {
#pragma unroll 1
    for (int first = 0; first < kUnitsOfLine; first += kUnits) {
      add_units<kUnits>(near, l, first);
      end_group(of_group);
      of_group = scales_.next_part(of_group);
    }
  }

  template <int kUnits>
  __device__ void add_units(unsigned near, int l, int first) {
    const unsigned weight = near + unsigned(l) * weight_step_;
    const unsigned x = near + unsigned(l * kXLines) * factors_.step();
    uint32_t words[(kUnits + 1) / 2][4];  // rows 0 to 7 and 8 to 15 of a unit, of the next one
#pragma unroll
    for (int i = 0; i < (kUnits + 1) / 2; ++i) {
      const int unit = (kUnits == 1 ? first & ~1 : first) + 2 * i;
      load_matrices<false>(words[i], weight + (weight_place_ ^ unsigned(unit * kUnitBytes)));
    }
    constexpr int kCount = kUnits / kUnitsOfBlock;
    const uint32_t one = 0x01010101, ones[4] = {one, one, one, one};
    uint32_t factors[(kCount + 1) / 2 * 2][kColumnTiles][2];
    const int from = first / kUnitsOfBlock;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      factors_.load(factors, x, from + i, i);
      const bool odd = kUnits == 1 ? first % 2 : i % 2;
      uint32_t tile[4];
      take_codes(tile, words[i * kUnitsOfBlock / 2], odd);
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        multiply_bytes(products_[j], tile, factors[i][j]);
        if (DSX_BITS == 4 || asymmetric_) multiply_bytes(codes_[j], ones, factors[i][j]);
      }
    }
  }

  // Of a block of both rows: of 4 bits, one of two units as bytes, the lower ones first.
  __device__ static void take_codes(uint32_t (&tile)[4], const uint32_t (&words)[4], bool odd) {
    if constexpr (DSX_BITS == 8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[i] = words[i];
    } else {
      const uint32_t low = odd ? words[2] : words[0], high = odd ? words[3] : words[1];
      tile[0] = low & 0x0f0f0f0f, tile[1] = high & 0x0f0f0f0f;
      tile[2] = low >> 4 & 0x0f0f0f0f, tile[3] = high >> 4 & 0x0f0f0f0f;
    }
  }

  __device__ void clear_group() {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) products_[j][i] = codes_[j][i] = 0;
    }
  }

  // See quantized_linear.h.
  __device__ void end_group(unsigned of_group) {
    const int zero = DSX_BITS == 4 ? (asymmetric_ ? 0 : -8) : (asymmetric_ ? 128 : 0);
    float scale[2], offset[2] = {};
    scales_.load(scale, of_group);
    if (asymmetric_) scales_.load_offsets(offset, of_group);
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& total = totals_[j * 4 + i];
        total = __fmaf_rn(scale[i / 2], float(products_[j][i] + zero * codes_[j][i]), total);
        if (asymmetric_) total = __fmaf_rn(offset[i / 2], float(codes_[j][i]), total);
      }
    }
    clear_group();
  }

  const IntegersCall& call_;
  const ScalePlaces scales_;
  const FactorPlaces<kColumnTiles> factors_;
  const unsigned weight_step_;  // from line to line
  const int first_x_, rows_of_x_;
  const bool asymmetric_;
  unsigned weight_place_;
  int lines_, left_;  // of the weight; of the group
  int products_[kColumnTiles][4], codes_[kColumnTiles][4];
  float totals_[kSums];
};

}  // namespace dsx::cuda
