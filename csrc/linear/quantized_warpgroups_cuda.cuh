// The products of quantized_linear on CUDA by four warps together, for more rows of x than
// quantized_products_cuda.cuh is quick with: x is read from shared memory once for the four, and
// codes of the next products are made while tensor cores have some to do. The sums are the same.
#pragma once

#include "common/cuda/warpgroup_mma.cuh"
#include "linear/quantized_products_cuda.cuh"

namespace dsx::cuda {

// Without offsets.
template <class T, int kBits, int kColumnTiles>
class WarpgroupProducts {
 public:
  static constexpr int kSums = kColumnTiles * 4;
  static constexpr bool kInOrder = false;
  static constexpr bool kFillsRegisters = true;

  __device__ WarpgroupProducts(const CodesCall& call, const Geometry& geometry,
                               const WeightRows& rows, int first_row)
      : scales_(call.scales, geometry, rows, first_row),
        weight_step_(unsigned(rows.columns * kLineBytes)),
        x_place_(unsigned(geometry.x_place)) {
    const int lane = threadIdx.x % kWarp;
    const int line = rows.line(geometry, first_row + lane % kTileRows);
    weight_place_ = unsigned(place_in_tma_tile(line, lane / kTileRows));
    clear();
  }

  __device__ void clear() {
#pragma unroll
    for (float& total : totals_) total = 0;
  }
  __device__ void copy_sums(float (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = totals_[i];
  }

  // Adds the products of line l of a stage, which is that number of the weight.
  __device__ void add(const char* stage, int l, int number) {
    const unsigned near = shared_address(stage);
    const unsigned of_line = scales_.of_line(near, l, number);
    switch (scales_.units()) {
      case 1: return add<1>(near, l, of_line, true);
      case 2: return add<2>(near, l, of_line, true);
      case 4: return add<4>(near, l, of_line, true);
      default: return add<kMostUnits>(near, l, of_line, false);
    }
  }

 private:
  static constexpr int kBlocksOfUnit = 8 / kBits;  // of 16 products each
  static constexpr int kXLines = 16 / kBits;
  static constexpr unsigned kXStep = kColumnTiles * kColumnTile * kLineBytes;
  static constexpr int kBlocks = kUnitsOfLine * kBlocksOfUnit, kBlocksOfXLine = 4;
  // As of CodeProducts: units that are added up before they become part of the totals.
  static constexpr int kMostUnits = kBits == 4 ? 4 : 8;

  // Batch by batch: while one is multiplied, the codes of the next one become numbers.
  template <int kPartUnits>
  __device__ void add(unsigned near, int l, unsigned of_part, bool own_scale) {
    constexpr int kPart = kPartUnits * kBlocksOfUnit, kBatch = kPart < 4 ? kPart : 4;
    constexpr int kBatches = kBlocks / kBatch, kOfPart = kPart / kBatch;
    const unsigned weight = near + unsigned(l) * weight_step_;
    const uint64_t x = tma_tile_factors(near + x_place_ + unsigned(l * kXLines) * kXStep);
    uint32_t words[kUnitsOfLine / 2][4], tiles[2][kBatch][4];
#pragma unroll
    for (int i = 0; i < kUnitsOfLine / 2; ++i) {
      load_matrices<false>(words[i], weight + (weight_place_ ^ unsigned(2 * i * kUnitBytes)));
    }
    float sums[kSums], scale[2];
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      if (batch > 1) wait_for_batches<1>();  // it reads the registers that are to be written
#pragma unroll
      for (int i = 0; i < kBatch; ++i) make_tile(tiles[batch % 2][i], words, batch * kBatch + i);
      if (batch % kOfPart == 0) {
        if (batch > 0) end_part(sums, scale);
        scales_.load(scale, of_part);
        if (own_scale) of_part = scales_.next_part(of_part);
      }
      begin_products();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int block = batch * kBatch + i;
        const unsigned place = unsigned(block / kBlocksOfXLine) * kXStep +
                               unsigned(block % kBlocksOfXLine * 2 * kUnitBytes);
        begin_product<T>(sums, tiles[batch % 2][i], further(x, place), block % kPart != 0);
      }
      end_batch();
    }
    end_part(sums, scale);
  }

  // Of block number i of a line, from the words of its units two by two.
  __device__ static void make_tile(uint32_t (&tile)[4],
                                   const uint32_t (&words)[kUnitsOfLine / 2][4], int i) {
    const int unit = i / kBlocksOfUnit, pair = i % kBlocksOfUnit * 2;
    const uint32_t (&of_unit)[4] = words[unit / 2];
    const uint32_t low = of_unit[unit % 2 * 2], high = of_unit[unit % 2 * 2 + 1];
    tile[0] = pair_of<kBits, T>(low, pair), tile[1] = pair_of<kBits, T>(high, pair);
    tile[2] = pair_of<kBits, T>(low, pair + 1), tile[3] = pair_of<kBits, T>(high, pair + 1);
  }

  __device__ void end_part(const float (&sums)[kSums], const float (&scale)[2]) {
    wait_for_batches<0>();
#pragma unroll
    for (int i = 0; i < kSums; ++i) totals_[i] = __fmaf_rn(scale[i / 2 % 2], sums[i], totals_[i]);
  }

  const ScalePlaces scales_;
  const unsigned weight_step_, x_place_;  // the former from line to line
  unsigned weight_place_;
  float totals_[kSums];
};

}  // namespace dsx::cuda
