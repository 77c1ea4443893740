// The products of skinny_linear on CUDA, of a warp: a tile of rows of the weight beside all rows of
// x, line by line as they lie in shared memory.
#pragma once

#include "linear/few_rows_cuda.cuh"
#include "common/cuda/mma.cuh"
#include "linear/skinny_linear.h"

namespace dsx::cuda {

// Sums of a tile beside kColumnTiles times 8 rows of x. A lane has those of rows `row` and row + 8
// of the tile, `row` being lane / 4, beside columns 2 pair and one more, `pair` being lane % 4: of
// each column tile the first row's two, then the second's. By the tensor cores, each of whose sums
// is that of its row and its column whatever the others are.
template <class T, int kColumnTiles>
class Products {
 public:
  static constexpr int kSums = kColumnTiles * 4;
  static constexpr bool kInOrder = false;
  static constexpr bool kFillsRegisters = false;

  // Of the tile that begins at that row of the cluster.
  __device__ Products(const FewRows& /*call*/, const Geometry& geometry, const WeightRows& rows,
                      int first_row)
      : weight_step_(rows.columns * kLineBytes), x_step_(geometry.x_rows * kLineBytes) {
    const int lane = threadIdx.x % kWarp;
    const int line = rows.line(geometry, first_row + lane % kTileRows);
    weight_place_ = place_in_tma_tile(line, lane / kTileRows);
    // Of one column tile, both words of two steps; of two, those of one.
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      const int row = kColumnTiles == 1 ? 0 : ::min(j * 16 + lane / 16 * 8, geometry.x_rows - 8);
      const int unit = kColumnTiles == 1 ? lane / 8 : lane / 8 % 2;
      x_places_[j] = geometry.x_place + place_in_tma_tile(row + lane % 8, unit);
    }
    clear();
  }

  __device__ void clear() {
#pragma unroll
    for (auto& of_tile : sums_) {
#pragma unroll
      for (float& sum : of_tile) sum = 0;
    }
  }
  __device__ void copy_sums(float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = sums_[i / 4][i % 4];
  }

  // Adds the products of line l of a stage.
  __device__ void add(const char* near, int l, int /*number*/) {
    const int weight_step = l * weight_step_, x_step = l * x_step_;
    uint32_t tiles[kSteps][4], factors[kSteps][kColumnTiles][2];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_factors(factors, near + x_step, step);
      const int place = weight_place_ ^ step * 2 * kUnitBytes;
      load_matrices<false>(tiles[step], near + weight_step + place);
    }
    // All that is read is asked for before the first product waits for it.
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (uint32_t& word : tiles[step]) asm volatile("" : "+r"(word));
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        multiply_matrices<T>(sums_[j], tiles[step], factors[step][j]);
      }
    }
  }

 private:
  static constexpr int kSteps = kUnitsOfLine / 2;  // of 16 products each
  static constexpr int kReads = kColumnTiles == 1 ? 1 : kColumnTiles / 2;

  __device__ void load_factors(uint32_t (&factors)[kSteps][kColumnTiles][2], const char* x,
                               int step) {
    uint32_t words[4];
    if constexpr (kColumnTiles > 1) {
#pragma unroll
      for (int j = 0; j < kReads; ++j) {
        load_matrices<false>(words, x + (x_places_[j] ^ step * 2 * kUnitBytes));
#pragma unroll
        for (int i = 0; i < 4; ++i) factors[step][2 * j + i / 2][i % 2] = words[i];
      }
    } else if (step % 2 == 0) {
      load_matrices<false>(words, x + (x_places_[0] ^ step * 2 * kUnitBytes));
#pragma unroll
      for (int i = 0; i < 4; ++i) factors[step + i / 2][0][i % 2] = words[i];
    }
  }

  const int weight_step_, x_step_;  // from line to line
  int weight_place_, x_places_[kReads];
  float sums_[kColumnTiles][4];
};

// The same of floats, which the tensor cores would round. Each lane has a quarter of the terms of
// each product, of two rows beside all columns, in the order of the length.
template <int kColumnTiles>
class Products<float, kColumnTiles> {
 public:
  static constexpr bool kInOrder = false;
  static constexpr bool kFillsRegisters = false;
  static constexpr int kSums = kColumnTiles * 4;

  __device__ Products(const FewRows& /*call*/, const Geometry& geometry, const WeightRows& rows,
                      int first_row)
      : rows_of_x_(rows.share.rows),
        x_place_(geometry.x_place),
        weight_step_(rows.columns * kLineBytes),
        x_step_(geometry.x_rows * kLineBytes) {
    const int row = first_row + int(threadIdx.x) % kWarp / 4;
    lines_[0] = rows.line(geometry, row);
    lines_[1] = rows.line(geometry, row + 8);
    clear();
  }

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < kColumns; ++m) quarters_[0][m] = quarters_[1][m] = 0;
  }

  __device__ void add(const char* near, int l, int /*number*/) {
    const int weight_step = l * weight_step_, x_step = l * x_step_;
    const int quarter = int(threadIdx.x) % 4;
#pragma unroll
    for (int unit = quarter; unit < kUnitsOfLine; unit += 4) {
      const auto unit_of = [&](const char* from, int line) {
        return *reinterpret_cast<const float4*>(from + place_in_tma_tile(line, unit));
      };
      const float4 w[2] = {unit_of(near + weight_step, lines_[0]),
                           unit_of(near + weight_step, lines_[1])};
#pragma unroll
      for (int m = 0; m < kColumns; ++m) {
        if (m >= rows_of_x_) continue;
        const float4 x = unit_of(near + x_step + x_place_, m);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& sum = quarters_[r][m];
          sum = __fmaf_rn(w[r].x, x.x, sum);
          sum = __fmaf_rn(w[r].y, x.y, sum);
          sum = __fmaf_rn(w[r].z, x.z, sum);
          sum = __fmaf_rn(w[r].w, x.w, sum);
        }
      }
    }
  }

  // Adds the quarters up. All threads of the warp call it together.
  __device__ void copy_sums(float (&sums)[kSums]) {
    const int quarter = int(threadIdx.x) % 4;
#pragma unroll
    for (int m = 0; m < kColumns; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = quarters_[r][m];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        if (m % kColumnTile / 2 == quarter) sums[m / kColumnTile * 4 + 2 * r + m % 2] = sum;
      }
    }
  }

 private:
  static constexpr int kColumns = kColumnTiles * kColumnTile;

  const int rows_of_x_, x_place_, weight_step_, x_step_;
  int lines_[2];
  float quarters_[2][kColumns];
};

}  // namespace dsx::cuda
