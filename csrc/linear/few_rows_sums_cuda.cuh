// Skinny GEMMs on CUDA: sums that warps and blocks have found come together,
// and become results.
#pragma once

#include "linear/few_rows_cuda.cuh"
#include "common/cuda/floats.cuh"

namespace dsx::cuda {

#include "common/activation_math.inl"
#include "common/inverse_rms_math.inl"
#include "linear/few_rows_math.inl"

// The sums of a cluster, in shared memory: each block has those of some columns of the results,
// [splits][rows of x][parts][columns], a split being some split-K parts. What is worked out about
// their places comes before the products, when there is time.
struct Sums {
  float* all;
  int rows, columns, pitch, splits;

  __device__ Sums(char* shared, const Share& share, const Geometry& geometry)
      : all(reinterpret_cast<float*>(shared)),
        rows(share.rows),
        columns(geometry.columns),
        pitch(geometry.sums_pitch),
        splits(geometry.cluster * geometry.groups) {}

  // Of what the first split has there: in pairs, as split-K parts are added in a warp.
  __device__ float total(const float* first) const {
    static_assert(kSplitKParts == 4);
    const int split = rows * pitch;
    if (splits == 1) return first[0];
    if (splits == 2) return first[0] + first[split];
    return (first[0] + first[split]) + (first[2 * split] + first[3 * split]);
  }
};

// Where a thread writes what its warp has of a tile beside all rows of x: to whoever finishes it.
class Sender {
 public:
  __device__ Sender(const Sums& sums, const Geometry& geometry, const WeightRows& rows, int split,
                    int first_row)
      : cluster_(geometry.cluster), pitch_(sums.pitch) {
    const int lane = int(threadIdx.x) % kWarp, first = lane % 4 * 2;
    rows_ = sums.rows - first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + lane / 4 + half * 8, part = row >= rows.columns;
      const int column = row - part * rows.columns;
      ranks_[half] = cluster_ > 1 ? geometry.rank_of(column) : 0;
      near_[half] = sums.all + (split * sums.rows + first) * pitch_ + part * sums.columns + column -
                    ranks_[half] * sums.columns;
    }
  }

  template <int kSums>
  __device__ void send(const float (&values)[kSums]) const {
    send(values, [&](float* near, int rank, float value) {
      write_in_cluster(near, cluster_, unsigned(rank), value);
    });
  }
  // The same with write(where this block would have it, whose block it is, value).
  template <int kSums, class Write>
  __device__ void send(const float (&values)[kSums], const Write& write) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int half = i % 4 / 2, m = i / 4 * kColumnTile + i % 2;
      if (m >= rows_) continue;
      write(near_[half] + m * pitch_, ranks_[half], values[i]);
    }
  }

 private:
  const int cluster_, pitch_;
  int rows_, ranks_[2];
  float* near_[2];
};

// Not in line, as it is long, and few calls have an activation.
__device__ __noinline__ inline float activated(const FewRows& call, float sum, float up) {
  return activated_sum(call, Floats<1>(sum), Floats<1>(up)).lanes[0];
}

// Adds a row of floats up for each of some rows, over the threads of a warp: each gets the sums, in
// an order that depends on the length alone. kEven: they are read 16 bytes at a time.
template <bool kEven, int kTogether>
__device__ inline void add_rows(const float* const (&rows)[kTogether], int length,
                                float (&sums)[kTogether]) {
#pragma unroll 4
  for (int i = int(threadIdx.x) % kWarp * 4; i < length; i += kWarp * 4) {
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      float4 four = {};
      if constexpr (kEven) {
        four = *reinterpret_cast<const float4*>(rows[r] + i);
      } else {
        four.x = rows[r][i];
        if (i + 1 < length) four.y = rows[r][i + 1];
        if (i + 2 < length) four.z = rows[r][i + 2];
        if (i + 3 < length) four.w = rows[r][i + 3];
      }
      sums[r] += (four.x + four.y) + (four.z + four.w);
    }
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
}

// What the sums of rows number `first`, first + step ... are multiplied with, for the norm before
// the layer. All threads of a warp call it; it has some rows at a time, as reading takes long.
template <int kTogether>
__device__ inline void find_inverses(const FewRows& call, float* inverses, int first, int step) {
  const int length = int(call.length / kSquared);
  for (; first < call.rows; first += kTogether * step) {
    const float* rows[kTogether];
    bool even = length % 4 == 0;
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const int64_t row = ::min(int64_t(first + r * step), call.rows - 1);
      rows[r] = call.squares.row<float>(row).address;
      even = even && reinterpret_cast<uintptr_t>(rows[r]) % sizeof(float4) == 0;
    }
    float sums[kTogether] = {};
    even ? add_rows<true>(rows, length, sums) : add_rows<false>(rows, length, sums);
    if (threadIdx.x % kWarp != 0) continue;
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const int row = first + r * step;
      if (row >= call.rows) continue;
      inverses[row] = inverse_rms_of_row(Floats<1>(sums[r]), call.length, call.eps).lanes[0];
    }
  }
}

// Writes call.inverses. A block, which is a warp, has a row.
static __global__ void __launch_bounds__(kWarp)
    inverses_kernel(const __grid_constant__ FewRows call) {
  let_next_begin();
  wait_for_previous();
  find_inverses<1>(call, call.inverses, int(blockIdx.x), int(gridDim.x));
}

// Of the norm after the layer, what a column is multiplied with.
template <class T>
__device__ inline float norm_weight_of(const FewRows& call, int64_t column) {
  return widen(call.norm_weight.row<T>(0).address[column]);
}

// Begins the norm after the layer with a result as it was rounded. The threads of kSquared
// neighbouring columns, which are neighbours in a warp, call it together.
template <class T>
__device__ inline void begin_norm(const FewRows& call, int64_t row, int64_t column, float weight,
                                  T out) {
  const float value = widen(out);
  const Floats<1> scaled = scaled_for_norm(Floats<1>(value), Floats<1>(weight), call.weight_offset);
  call.scaled.even_row<T>(row).address[column] = narrow<T>(scaled.lanes[0]);
  constexpr unsigned kLanes = unsigned(kSquared);
  const unsigned lanes = ((1u << kLanes) - 1) << (threadIdx.x % kWarp / kLanes * kLanes);
  float sum = __fmul_rn(value, value);
#pragma unroll
  for (int distance = 1; distance < kSquared; distance *= 2) {
    sum += __shfl_xor_sync(lanes, sum, distance);
  }
  if (column % kSquared == 0) {
    call.out_squares.even_row<float>(row).address[column / kSquared] = sum;
  }
}

// What becomes of the sum of a row of x beside a column, and beside what that gates, with that
// number of the biases. `inverses` are those of find_inverses, if there is a norm before the layer.
template <class T>
__device__ inline float result_of(const FewRows& call, int64_t row, int64_t column, int bias,
                                  const float* inverses, float sum, float up) {
  if (call.squares.is_present()) {
    sum = __fmul_rn(sum, inverses[row]);
    up = __fmul_rn(up, inverses[row]);
  }
  const auto element = [](const Rows& rows, int64_t r, int64_t i) {
    return rows.is_present() ? widen(rows.row<T>(r).address[i]) : 0.0f;
  };
  float result = sum + element(call.bias, bias, column);
  if (call.activated) {
    if (call.gated) up += element(call.bias, bias, call.columns + column);
    result = activated(call, result, up);
  }
  return result + element(call.residual, row, column);
}

// Makes results of the sums of the columns that a block finishes: a thread has one column, and
// every so many rows of x.
template <class T>
class Finisher {
 public:
  __device__ Finisher(const FewRows& call, const Geometry& geometry, const WeightRows& rows,
                      const Sums& sums, int rank)
      : call_(call), sums_(sums), bias_(rows.share.number), step_(geometry.finished_rows) {
    first_ = geometry.rank_of(int(threadIdx.x));
    const int c = int(threadIdx.x) - first_ * sums.columns;
    column_ = rows.first + rank * sums.columns + c;
    near_ = sums.all + first_ * sums.pitch + c;
    out_ = call.out.even_row<T>(rows.share.first + first_).address + column_;
    if (first_ >= step_ || column_ >= call.columns) first_ = sums.rows;  // it has none
  }

  __device__ void finish(const float* inverses) {
    const bool norm_after = call_.scaled.is_present() && first_ < sums_.rows;
    const float norm_weight = norm_after ? norm_weight_of<T>(call_, column_) : 0;
    for (int m = first_; m < sums_.rows; m += step_) {
      const float up = call_.gated ? sums_.total(near_ + sums_.columns) : 0;
      const float result = result_of<T>(call_, m, column_, bias_, inverses, sums_.total(near_), up);
      const T out = narrow<T>(result);
      *out_ = out;
      if (norm_after) begin_norm<T>(call_, m, column_, norm_weight, out);
      near_ += step_ * sums_.pitch;
      out_ += step_ * call_.out.pitch;
    }
  }

 private:
  const FewRows& call_;
  const Sums& sums_;
  const int bias_, step_;
  int first_;
  int64_t column_;
  const float* near_;
  T* out_;
};

}  // namespace dsx::cuda
