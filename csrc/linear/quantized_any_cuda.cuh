// quantized_linear on CUDA for whatever is not for tensor cores: x of 32 bits, NF4, groups of any
// size, and by integers. A warp has a row of the weight, and of gates also the one that is gated.
#pragma once

#include "linear/few_rows_sums_cuda.cuh"
#include "common/cuda/launch.cuh"
#include "quantization/quantize.h"
#include "linear/quantized_linear.h"
#include "linear/unpack_cuda.cuh"

namespace dsx {

#include "quantization/quantize_math.inl"

namespace cuda {

constexpr int kAnyWarps = 4;  // of a block

// The sums of all lanes, added in a fixed tree; each gets them. There are some rows of x at a time.
template <int kRowsTogether>
__device__ inline void add_lanes(float (&sums)[kRowsTogether]) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
}

// Those of find_inverses in shared memory, for all threads of a block, which call it together.
__device__ inline const float* inverses_nearby(const QuantizedLinear& call) {
  __shared__ float inverses[kMostRows];
  if (call.squares.is_present()) {
    find_inverses<1>(call, inverses, int(threadIdx.x) / kWarp, kAnyWarps);
    __syncthreads();
  }
  return inverses;
}

// Lane r stores the result of row first + r of x.
template <class T, int kRowsTogether>
__device__ inline void store_results(const QuantizedLinear& call, int64_t first, int64_t column,
                                     const float* inverses, const float (&sums)[2][kRowsTogether]) {
#pragma unroll
  for (int r = 0; r < kRowsTogether; ++r) {
    const int64_t row = first + r;
    if (int(threadIdx.x) % kWarp != r || row >= call.rows) continue;
    call.out.even_row<T>(row).address[column] =
        narrow<T>(result_of<T>(call, row, column, 0, inverses, sums[0][r], sums[1][r]));
  }
}

// A lane has every 32nd run of codes, as floats.
template <class T, int kRowsTogether>
__device__ inline void add_floats(const QuantizedLinear& call, const float* levels,
                                  int64_t weight_row, int64_t first, bool aligned,
                                  float (&sums)[kRowsTogether]) {
  const PackedWeight& weight = call.weight;
  const int64_t runs = ceil_div(call.length, int64_t(kRun));
  for (int64_t i = threadIdx.x % kWarp; i < runs; i += kWarp) {
    const RunOfCodes run(weight, levels, weight_row, i);
#pragma unroll
    for (int p = 0; p < kRun / 8; ++p) {
      const int64_t k = i * kRun + 8 * p, left = call.length - k;
      if (left <= 0) continue;
      float values[8];
      floats_of(weight, run, weight_row, k, p, values);
#pragma unroll
      for (int r = 0; r < kRowsTogether; ++r) {
        if (first + r >= call.rows) continue;
        const auto source = call.x.row<T>(first + r) + k;
        const Floats<8> x = aligned && left >= 8
                                ? load<Access::vector, 8>(source, 8)
                                : load<Access::single, 8>(source, int(left < 8 ? left : 8));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (j < left) sums[r] = __fmaf_rn(values[j], x.lanes[j], sums[r]);
        }
      }
    }
  }
  add_lanes(sums);
}

// Columns of a block. All of its threads call it.
template <class T, int kRowsTogether>
__device__ inline void any_columns(const QuantizedLinear& call, bool aligned) {
  const float* const levels = levels_nearby();
  const float* const inverses = inverses_nearby(call);
  const int64_t column = int64_t(blockIdx.x) * kAnyWarps + threadIdx.x / kWarp;
  if (column >= call.columns) return;
  for (int64_t first = 0; first < call.rows; first += kRowsTogether) {
    float sums[2][kRowsTogether] = {};
    add_floats<T, kRowsTogether>(call, levels, column, first, aligned, sums[0]);
    if (call.gated)
      add_floats<T, kRowsTogether>(call, levels, call.columns + column, first, aligned, sums[1]);
    store_results<T, kRowsTogether>(call, first, column, inverses, sums);
  }
}

template <class T, int kRowsTogether>
__global__ void __launch_bounds__(kAnyWarps* kWarp)
    quantized_any_kernel(const __grid_constant__ QuantizedLinear call, bool aligned) {
  any_columns<T, kRowsTogether>(call, aligned);
}

// Begins the norm after the layer with all results: a thread has one.
template <class T>
__global__ void __launch_bounds__(256)
    begin_norm_kernel(const __grid_constant__ QuantizedLinear call) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = i / call.columns, column = i - row * call.columns;
  if (row >= call.rows) return;
  begin_norm<T>(call, row, column, norm_weight_of<T>(call, column),
                call.out.even_row<T>(row).address[column]);
}

// Rows of x as bytes, in the order of the bytes that a word of codes is taken apart into: of 4 bits
// the lower ones of all bytes of a run, then the upper ones. There are as many as codes in a row,
// with zeros in the end; behind all rows is a scale for each.
struct RowsOfBytes {
  static constexpr int kHalves = 8 / DSX_BITS;

  uint8_t* bytes;
  float* scales;
  int64_t pitch;

  __host__ __device__ RowsOfBytes(const QuantizedLinear& call, void* workspace)
      : bytes(static_cast<uint8_t*>(workspace)), pitch(call.weight.row_bytes * 8 / DSX_BITS) {
    scales = reinterpret_cast<float*>(bytes + call.rows * pitch);
  }
  int64_t size(const QuantizedLinear& call) const {
    return call.rows * (pitch + int64_t(sizeof(float)));
  }

  // Where an element of a run is in it.
  __device__ static int place_of(int k) {
    // Number h * (codes of a word) / 2 + p of word w.
    const int p = k / 8, w = k % 8 / 2, h = k % 2;
    const int number = h * (kCodesOfWord / 2) + p;
    return number % kHalves * int(kRunBytes) + 4 * w + number / kHalves;
  }
};

// A block has a row of x. The kernel behind it may ask for its weight meanwhile.
template <class T>
__global__ void __launch_bounds__(256)
    round_rows_kernel(const __grid_constant__ QuantizedLinear call, void* workspace) {
  let_next_begin();
  const RowsOfBytes to(call, workspace);
  const int64_t row = blockIdx.x;
  const T* const x = call.x.row<T>(row).address;
  __shared__ uint32_t of_warps[8];
  uint32_t largest = 0;
  for (int64_t k = threadIdx.x; k < call.length; k += blockDim.x) {
    largest = dsx::max(largest, magnitude_of(dsx::bits_of(widen(x[k]))));
  }
  largest = max_of_warp(largest);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = largest;
  __syncthreads();
  for (const uint32_t other : of_warps) largest = dsx::max(largest, other);
  const Grid grid = grid_of(symmetric_scale(largest, {QuantFormat::int8, false}), false);
  if (threadIdx.x == 0) to.scales[row] = grid.step;
  for (int64_t k = threadIdx.x; k < to.pitch; k += blockDim.x) {
    uint32_t code = 0;
    if (k < call.length) {
      const float sum = round_to_grid<uint32_t>(widen(x[k]), grid, grid.half, kIntegers);
      code = dsx::bits_of(sum) & grid.mask;
    }
    to.bytes[row * to.pitch + k / kRun * kRun + RowsOfBytes::place_of(int(k % kRun))] =
        uint8_t(code);
  }
}

// Sums of products of codes, and of the codes of x, over a piece of a group.
template <int kRowsTogether>
struct IntegerSums {
  int products[kRowsTogether], codes[kRowsTogether];
};

template <int kRowsTogether>
class IntegerProducts {
  using Sums = IntegerSums<kRowsTogether>;

 public:
  __device__ IntegerProducts(const QuantizedLinear& call, const RowsOfBytes& x, int64_t weight_row)
      : call_(call), x_(x), row_(weight_row) {}

  // Adds those of the elements [begin, end) of a run.
  __device__ void add_run(int64_t run, int begin, int end, int64_t first, Sums& sums) const {
    const RunOfCodes codes(call_.weight, nullptr, row_, run);
    uint32_t parts[RowsOfBytes::kHalves][4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      parts[0][w] = DSX_BITS == 8 ? codes.word(w) : codes.word(w) & 0x0f0f0f0f;
      if (DSX_BITS == 4) parts[RowsOfBytes::kHalves - 1][w] = codes.word(w) >> 4 & 0x0f0f0f0f;
    }
#pragma unroll
    for (int r = 0; r < kRowsTogether; ++r) {
      if (first + r >= call_.rows) continue;
      const uint8_t* const bytes = x_.bytes + (first + r) * x_.pitch + run * kRun;
#pragma unroll
      for (int half = 0; half < RowsOfBytes::kHalves; ++half) {
        const uint4 four = reinterpret_cast<const uint4*>(bytes)[half];
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int place = half * int(kRunBytes) + 4 * w;
          const int all = int(words[w]);
          const int word = end - begin < kRun ? all & mask_of(place, begin, end) : all;
          sums.products[r] = __dp4a(int(parts[half][w]), word, sums.products[r]);
          sums.codes[r] = __dp4a(0x01010101, word, sums.codes[r]);
        }
      }
    }
  }

  // Of so many lanes, neighbours; each of them gets the sums.
  __device__ static void add_lanes(Sums& sums, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int r = 0; r < kRowsTogether; ++r) {
        sums.products[r] += __shfl_xor_sync(0xffffffff, sums.products[r], distance);
        sums.codes[r] += __shfl_xor_sync(0xffffffff, sums.codes[r], distance);
      }
    }
  }

  // Adds to the totals what a lane has of a piece of a group. All lanes call it.
  __device__ void add_piece(const Sums& sums, const ScaleOf& scale, int lane,
                            float (&totals)[kRowsTogether]) const {
    const PackedWeight& weight = call_.weight;
    const bool symmetric = weight.offsets == nullptr;
    const int zero = DSX_BITS == 4 ? (symmetric ? -8 : 0) : (symmetric ? 0 : 128);
    const float s = __shfl_sync(0xffffffff, scale.scale, lane);
    const float o = __shfl_sync(0xffffffff, scale.offset, lane);
#pragma unroll
    for (int r = 0; r < kRowsTogether; ++r) {
      const int codes = __shfl_sync(0xffffffff, sums.codes[r], lane);
      const int products = __shfl_sync(0xffffffff, sums.products[r], lane) + zero * codes;
      totals[r] = __fmaf_rn(s, float(products), totals[r]);
      if (!symmetric) totals[r] = __fmaf_rn(o, float(codes), totals[r]);
    }
  }

  // Groups of 1, 2, 4 ... 32 runs: as many at a time as there are lanes for.
  __device__ void add_even_groups(int64_t first, int runs_of_group,
                                  float (&totals)[kRowsTogether]) const {
    const PackedWeight& weight = call_.weight;
    const int lane = threadIdx.x % kWarp;
    const int64_t runs = ceil_div(call_.length, int64_t(kRun)), groups = weight.groups();
    for (int64_t from = 0; from < runs; from += kWarp) {
      Sums sums = {};
      if (from + lane < runs) add_run(from + lane, 0, kRun, first, sums);
      add_lanes(sums, runs_of_group);
      const int64_t group = from / runs_of_group;
      const ScaleOf scale(weight, row_, ::min(group + lane / runs_of_group, groups - 1));
      for (int i = 0; i < kWarp / runs_of_group; ++i) {
        if (group + i < groups) add_piece(sums, scale, i * runs_of_group, totals);
      }
    }
  }

  // Groups of any size, piece by piece.
  __device__ void add_any_groups(int64_t first, float (&totals)[kRowsTogether]) const {
    const PackedWeight& weight = call_.weight;
    int64_t group = 0;
    for (int64_t begin = 0; begin < call_.length;) {
      const int64_t end_of_group = ::min((group + 1) * weight.group, call_.length);
      const int64_t end = ::min(begin + kExactLength, end_of_group);
      Sums sums = {};
      for (int64_t run = begin / kRun + threadIdx.x % kWarp; run * kRun < end; run += kWarp) {
        const int64_t at = run * kRun;
        add_run(run, int(::max(begin - at, int64_t(0))), int(::min(end - at, int64_t(kRun))), first,
                sums);
      }
      add_lanes(sums, kWarp);
      add_piece(sums, ScaleOf(weight, row_, group), 0, totals);
      begin = end;
      if (begin == end_of_group) ++group;
    }
  }

 private:
  // Of the four bytes from a place of a run on, those of elements [begin, end).
  __device__ static int mask_of(int place, int begin, int end) {
    uint32_t mask = 0;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      const int w = place % int(kRunBytes) / 4;
      const int number = byte * RowsOfBytes::kHalves + place / int(kRunBytes);
      const int half = kCodesOfWord / 2, k = 8 * (number % half) + number / half + 2 * w;
      if (k >= begin && k < end) mask |= 0xffu << 8 * byte;
    }
    return int(mask);
  }

  const QuantizedLinear& call_;
  const RowsOfBytes& x_;
  const int64_t row_;
};

// Columns of a block. All of its threads call it. `runs_of_group` is 0 for groups of any size.
template <class T, int kRowsTogether>
__device__ inline void integer_columns(const QuantizedLinear& call, const RowsOfBytes& x,
                                       int runs_of_group) {
  const float* const inverses = inverses_nearby(call);
  const int64_t column = int64_t(blockIdx.x) * kAnyWarps + threadIdx.x / kWarp;
  if (column >= call.columns) return;
  for (int64_t first = 0; first < call.rows; first += kRowsTogether) {
    float sums[2][kRowsTogether] = {};
    for (int part = 0; part < (call.gated ? 2 : 1); ++part) {
      const IntegerProducts<kRowsTogether> products(call, x, part * call.columns + column);
      if (runs_of_group > 0) {
        products.add_even_groups(first, runs_of_group, sums[part]);
      } else {
        products.add_any_groups(first, sums[part]);
      }
#pragma unroll
      for (int r = 0; r < kRowsTogether; ++r) {
        sums[part][r] *= x.scales[::min(first + r, call.rows - 1)];
      }
    }
    store_results<T, kRowsTogether>(call, first, column, inverses, sums);
  }
}

template <class T, int kRowsTogether>
__global__ void __launch_bounds__(kAnyWarps* kWarp)
    integer_kernel(const __grid_constant__ QuantizedLinear call, void* workspace,
                   int runs_of_group) {
  integer_columns<T, kRowsTogether>(call, RowsOfBytes(call, workspace), runs_of_group);
}

}  // namespace cuda
}  // namespace dsx
