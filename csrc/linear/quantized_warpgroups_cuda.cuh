// The products of quantized_linear on CUDA by four warps together, for more rows of x than
// quantized_products_cuda.cuh is quick with: x is read from shared memory once for the four, and
// codes of the next products are made while tensor cores have some to do. The sums are the same.
#pragma once

#include "common/cuda/warpgroup_mma.cuh"
#include "linear/quantized_products_cuda.cuh"

namespace dsx::cuda {

// Without offsets.
//
// Work goes batch by batch: while tensor cores have one, the codes of the next one become numbers,
// and the sums of the part before it become part of the totals. Parts have two sets of sums in
// turn, and batches two sets of numbers.
template <class T, int kBits, int kColumnTiles>
class WarpgroupProducts {
 public:
  static constexpr int kSums = kColumnTiles * 4;
  static constexpr bool kInOrder = false;
  static constexpr bool kFillsRegisters = true;

  __device__ WarpgroupProducts(const CodesCall& call, const Geometry& geometry,
                               const WeightRows& rows, int first_row)
      : scales_(call.scales, geometry, rows, first_row),
        turns_(int(threadIdx.x) / kWarp / kGroupWarps,
               geometry.groups * geometry.tiles == 2 * kGroupWarps),
        x_place_(unsigned(geometry.x_place)) {
    const int lane = threadIdx.x % kWarp;
    const int line = rows.line(geometry, first_row + lane % kTileRows);
    weight_place_ = unsigned(place_in_tma_tile(line, lane / kTileRows));
  }

  // Calls body with what adds up the products of a line, chosen once: number of units of a part.
  template <class Body>
  __device__ void with_part_units(const Body& body) {
    switch (scales_.units()) {
      case 1: return body(std::integral_constant<int, 1>{});
      case 2: return body(std::integral_constant<int, 2>{});
      case 4: return body(std::integral_constant<int, 4>{});
      default: return body(std::integral_constant<int, kUnitsOfLine>{});
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) totals_[i] = sums_[1][i] = 0;
    scale_[1][0] = scale_[1][1] = 0;
  }
  __device__ void copy_sums(float (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = totals_[i] * kCodeOfFraction<kBits, T>;
  }

  // Adds the products of the line of a stage, which is that number of the weight.
  template <int kUnitsOfPart>
  __device__ void add(const char* stage, int number) {
    constexpr int kPartUnits = kUnitsOfPart < kMostUnits ? kUnitsOfPart : kMostUnits;
    constexpr int kPart = kPartUnits * kBlocksOfUnit, kBatch = kPart < 4 ? kPart : 4;
    constexpr int kOfPart = kPart / kBatch, kParts = kUnitsOfLine / kPartUnits;
    const unsigned near = shared_address(stage);
    unsigned of_part = scales_.of_line(near, 0, number);
    const uint64_t x = tma_tile_factors(near + x_place_);
    uint32_t words[(kPartUnits + 1) / 2][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int turn = part % 2, unit = part * kPartUnits;
#pragma unroll
      for (int i = 0; i < (kPartUnits + 1) / 2; ++i) {
        const unsigned place = unsigned((unit / 2 + i) * 2 * kUnitBytes);
        load_matrices<false>(words[i], near + (weight_place_ ^ place));
      }
#pragma unroll
      for (int of_part_now = 0; of_part_now < kOfPart; ++of_part_now) {
        const int set = (part * kOfPart + of_part_now) % 2;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          make_tile(tiles_[set][i], words, unit % 2 * (kPartUnits == 1), of_part_now * kBatch + i);
        }
        turns_.wait();
        begin_products();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int block = part * kPart + of_part_now * kBatch + i;
          const unsigned place = unsigned(block / kBlocksOfXLine) * kXStep +
                                 unsigned(block % kBlocksOfXLine * 2 * kUnitBytes);
          begin_product<T>(sums_[turn], tiles_[set][i], further(x, place),
                           of_part_now > 0 || i > 0);
        }
        end_batch();
        turns_.pass();
        wait_for_batches<1>();
        if (of_part_now == 0 && (part > 0 || kDefers<kUnitsOfPart>)) end_part(1 - turn);
      }
      scales_.load(scale_[turn], of_part);
      if (kUnitsOfPart < kUnitsOfLine) of_part = scales_.next_part(of_part);
    }
    wait_for_batches<0>();  // the compiler takes no batch that outlasts a loop's round
    if (!kDefers<kUnitsOfPart>) end_part(0);
  }

  // After the last line of a split-K part.
  template <int kUnitsOfPart>
  __device__ void end() {
    if (kDefers<kUnitsOfPart>) end_part(1);
  }
  // After the last line of all.
  __device__ void end_turns() const { turns_.end(); }

 private:
  static constexpr int kBlocksOfUnit = 8 / kBits;  // of 16 products each
  static constexpr unsigned kXStep = kColumnTiles * kColumnTile * kLineBytes;
  static constexpr int kBlocksOfXLine = 4;
  // As of CodeProducts: units that are added up before they become part of the totals.
  static constexpr int kMostUnits = kBits == 4 ? 4 : 8;
  // Whether the last part of a line ends while the next line's first batch is multiplied: then it
  // has the second set of sums.
  template <int kUnitsOfPart>
  static constexpr bool kDefers =
      kUnitsOfLine / (kUnitsOfPart < kMostUnits ? kUnitsOfPart : kMostUnits) % 2 == 0;

  // Of block number i of a part, from the words of its units two by two.
  template <int kPairs>
  __device__ static void make_tile(uint32_t (&tile)[4], const uint32_t (&words)[kPairs][4], int odd,
                                   int i) {
    const int unit = i / kBlocksOfUnit + odd, pair = i % kBlocksOfUnit * 2;
    const uint32_t (&of_unit)[4] = words[unit / 2];
    const uint32_t low = of_unit[unit % 2 * 2], high = of_unit[unit % 2 * 2 + 1];
    tile[0] = fractions_of<kBits, T>(low, pair), tile[1] = fractions_of<kBits, T>(high, pair);
    tile[2] = fractions_of<kBits, T>(low, pair + 1),
    tile[3] = fractions_of<kBits, T>(high, pair + 1);
  }

  __device__ void end_part(int turn) {
    use_from_here(sums_[turn]);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      totals_[i] = __fmaf_rn(scale_[turn][i / 2 % 2], sums_[turn][i], totals_[i]);
    }
  }

  const ScalePlaces scales_;
  const Turns turns_;
  const unsigned x_place_;
  unsigned weight_place_;
  float totals_[kSums], sums_[2][kSums], scale_[2][2];
  uint32_t tiles_[2][4][4];
};

}  // namespace dsx::cuda
