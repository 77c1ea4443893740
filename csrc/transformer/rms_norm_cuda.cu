// rms_norm on CUDA: each team of threads takes a row, or a group of rows one after the other when
// it adds up the gradient of the weight; a small kernel then adds the groups.
#include "transformer/rms_norm.h"

#include "common/cuda/check.h"
#include "common/cuda/rows.cuh"

namespace dsx {

#include "transformer/rms_norm_math.inl"

namespace {

using cuda::Floats;
using cuda::kRowVector;
using cuda::RowVector;
using Values = Floats<kRowVector>;

// Of any dtype: after the first row it is in the cache.
__device__ Values weight_at(Pointer<Any> weight, int64_t i, int count, bool aligned) {
  return weight ? floats_of(cuda::fetch(weight, i, count, aligned)) : Values(1.0f);
}

// What a thread has of a row: in registers, or to be read again each time.
template <class Team, class T>
struct HeldRow {
  RowVector<T> vectors[Team::kVectors > 0 ? Team::kVectors : 1];

  __device__ void fetch(Pointer<T> row, int64_t length, bool aligned) {
    if constexpr (Team::kVectors > 0) {
      cuda::for_each_row_vector<Team>(length, [&](int v, int64_t i, int count) {
        vectors[v] = cuda::fetch(row, i, count, aligned);
      });
    }
  }

  __device__ Values get(Pointer<T> row, int v, int64_t i, int count, bool aligned) const {
    if constexpr (Team::kVectors > 0) return floats_of(vectors[v]);
    return floats_of(cuda::fetch(row, i, count, aligned));
  }
};

template <class Team, class T>
__device__ void normalize_row(const RmsNorm& norm, int64_t row, bool aligned) {
  const int64_t n = norm.length;
  const Pointer<Any> weight = norm.weight.row<Any>(0);
  const Pointer<T> out = norm.out.row<T>(row);
  const Pointer<T> residual = norm.residual.row<T>(row), sum = norm.sum.row<T>(row);
  Pointer<T> x = norm.x.row<T>(row);
  HeldRow<Team, T> held, held_residual;
  held.fetch(x, n, aligned);
  if (residual) held_residual.fetch(residual, n, aligned);
  float squares[1] = {};
  cuda::for_each_row_vector<Team>(n, [&](int v, int64_t i, int count) {
    Values value = held.get(x, v, i, count, aligned);
    if (residual) {
      const Values total = value + held_residual.get(residual, v, i, count, aligned);
      const RowVector<T> stored = cuda::put(sum, i, count, aligned, total);
      if constexpr (Team::kVectors > 0) held.vectors[v] = stored;
      value = floats_of(stored);
    }
    squares[0] += cuda::sum_of_lanes(value * value);
  });
  if (residual) x = sum;
  cuda::add_over_team<Team>(squares);
  const Values inverse = inverse_rms(Floats<1>(squares[0]), float(n), norm.eps).lanes[0];
  cuda::for_each_row_vector<Team>(n, [&](int v, int64_t i, int count) {
    const Values value = held.get(x, v, i, count, aligned);
    cuda::put(out, i, count, aligned,
              normalized(value, inverse, weight_at(weight, i, count, aligned)));
  });
}

// Two blocks of the largest teams on a multiprocessor, so that one loads while the other computes;
// floats would not fit into the registers that are left for each.
template <class Team, class T>
constexpr int kResidentBlocks = Team::kThreads == 512 && sizeof(T) == 2 ? 2 : 1;

template <class Team, class T>
__global__ void __launch_bounds__(Team::kBlock, (kResidentBlocks<Team, T>))
    norm_kernel(const __grid_constant__ RmsNorm norm, bool aligned) {
  const int64_t teams = cuda::team_count<Team>();
  for (int64_t row = cuda::team_index<Team>(); row < norm.rows; row += teams) {
    normalize_row<Team, T>(norm, row, aligned);
  }
}

// The gradient of the weight of a group of rows: in registers, or in memory if rows are too long.
template <class Team>
struct Partial {
  Values totals[Team::kVectors > 0 ? Team::kVectors : 1];
  float* memory;  // [length] written; null: not wanted

  __device__ void add(const Values& term, bool first, int v, int64_t i, int count) {
    if constexpr (Team::kVectors > 0) {
      totals[v] = first ? term : totals[v] + term;
    } else if (memory != nullptr) {
      const Pointer<float> total{memory + i};
      constexpr cuda::Access kSingle = cuda::Access::single;
      const Values before = first ? Values(0.0f) : cuda::load<kSingle, kRowVector>(total, count);
      cuda::store<kSingle>(total, before + term, count);
    }
  }

  __device__ void finish(int64_t length) const {
    if (Team::kVectors == 0 || memory == nullptr) return;
    cuda::for_each_row_vector<Team>(length, [&](int v, int64_t i, int count) {
      cuda::store<cuda::Access::single>(Pointer<float>{memory + i}, totals[v], count);
    });
  }
};

template <class Team, class T>
__device__ void backward_of_row(const RmsNormBackward& norm, int64_t row, bool aligned,
                                Partial<Team>& partial, bool first) {
  const int64_t n = norm.length;
  const Pointer<T> x = norm.x.row<T>(row), grad_out = norm.grad_out.row<T>(row);
  const Pointer<T> grad_x = norm.grad_x.row<T>(row), grad_sum = norm.grad_sum.row<T>(row);
  const Pointer<Any> weight = norm.weight.row<Any>(0);
  HeldRow<Team, T> held_x, held_grad;
  held_x.fetch(x, n, aligned);
  held_grad.fetch(grad_out, n, aligned);
  float sums[2] = {};
  cuda::for_each_row_vector<Team>(n, [&](int v, int64_t i, int count) {
    const Values value = held_x.get(x, v, i, count, aligned);
    const Values grad = held_grad.get(grad_out, v, i, count, aligned);
    sums[0] += cuda::sum_of_lanes(value * value);
    sums[1] += cuda::sum_of_lanes(value * (grad * weight_at(weight, i, count, aligned)));
  });
  cuda::add_over_team<Team>(sums);
  const Floats<1> one_inverse = inverse_rms(Floats<1>(sums[0]), float(n), norm.eps);
  const Values share = rms_share(Floats<1>(sums[1]), one_inverse, float(n)).lanes[0];
  const Values inverse = one_inverse.lanes[0];
  cuda::for_each_row_vector<Team>(n, [&](int v, int64_t i, int count) {
    const Values value = held_x.get(x, v, i, count, aligned);
    const Values grad = held_grad.get(grad_out, v, i, count, aligned);
    const Values weighted = grad * weight_at(weight, i, count, aligned);
    Values result = grad_of_x(value, weighted, inverse, share);
    if (grad_sum) result = result + floats_of(cuda::fetch(grad_sum, i, count, aligned));
    cuda::put(grad_x, i, count, aligned, result);
    partial.add(grad_of_weight(value, grad, inverse), first, v, i, count);
  });
}

template <class Team, class T>
__global__ void __launch_bounds__(Team::kBlock)
    backward_kernel(const __grid_constant__ RmsNormBackward norm, int64_t rows_of_group,
                    float* partials,  // [groups, length] written; null: not wanted
                    bool aligned) {
  const int64_t teams = cuda::team_count<Team>();
  for (int64_t group = cuda::team_index<Team>(); group * rows_of_group < norm.rows;
       group += teams) {
    Partial<Team> partial{{}, partials == nullptr ? nullptr : partials + group * norm.length};
    const int64_t first = group * rows_of_group;
    const int64_t end = ::min(first + rows_of_group, norm.rows);
    for (int64_t row = first; row < end; ++row) {
      backward_of_row<Team, T>(norm, row, aligned, partial, row == first);
    }
    partial.finish(norm.length);
  }
}

// Columns of a block, and threads that share the groups of a column.
constexpr int kColumns = 32, kShares = 16;

__global__ void __launch_bounds__(kColumns* kShares)
    add_partials_kernel(const float* partials,  // [groups, length]
                        int64_t groups, int64_t length, Rows grad_weight) {
  __shared__ float of_shares[kShares][kColumns];
  const int lane = threadIdx.x % kColumns, share = threadIdx.x / kColumns;
  const int64_t column = int64_t(blockIdx.x) * kColumns + lane;
  float sum = 0;
  if (column < length) {
#pragma unroll 8  // loads in flight
    for (int64_t group = share; group < groups; group += kShares) {
      sum += partials[group * length + column];
    }
  }
  of_shares[share][lane] = sum;
  __syncthreads();
  if (share > 0 || column >= length) return;
  sum = 0;
  for (int i = 0; i < kShares; ++i) sum += of_shares[i][lane];
  const Pointer<Any> target = grad_weight.row<Any>(0) + column;
  cuda::store<cuda::Access::single>(target, Floats<1>(sum), 1);
}

constexpr const char* kOp = "rms_norm";
constexpr const char* kBackwardOp = "rms_norm_backward";

// Enough groups to fill a large device, whatever the device; a float adds up 256 rows at the most.
template <class Team>
int64_t rows_of_group(int64_t rows) {
  constexpr int64_t kGroups = (Team::kThreads <= 128 ? 512 : 256) * Team::kTeams;
  return std::clamp<int64_t>(ceil_div(rows, kGroups), 1, 256);
}

// Calls body(team, storage) as cuda::with_row_team does, and with `aligned`.
template <class Body>
void with_team(int64_t length, std::initializer_list<Rows> rows, const Rows& weight,
               const Body& body) {
  const Rows& first = *rows.begin();
  const bool aligned = cuda::all_aligned(rows) && cuda::all_aligned({weight});
  const bool same = std::all_of(rows.begin(), rows.end(), [&](const Rows& each) {
    return each.data == nullptr || each.dtype == first.dtype;
  });
  cuda::with_row_team(length, aligned && same && length % kRowVector == 0, first,
                      [&](auto team, auto storage) { body(team, storage, aligned); });
}

}  // namespace

void rms_norm_cuda(const RmsNorm& norm, void* stream) {
  if (norm.rows == 0 || norm.length == 0) return;
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  with_team(norm.length, {norm.x, norm.residual, norm.sum, norm.out}, norm.weight,
            [&](auto team, auto storage, bool aligned) {
    using Team = decltype(team);
    norm_kernel<Team, decltype(storage)>
        <<<cuda::blocks_for<Team>(norm.rows), Team::kBlock, 0, cudaStream_t(stream)>>>(norm,
                                                                                       aligned);
  });
  cuda::check(cudaGetLastError(), kOp);
}

int64_t rms_norm_backward_workspace(const RmsNormBackward& norm) {
  int64_t groups = 0;
  cuda::with_row_team(norm.length, false, norm.x, [&](auto team, auto /*storage*/) {
    groups = ceil_div(norm.rows, rows_of_group<decltype(team)>(norm.rows));
  });
  return groups * norm.length;
}

void rms_norm_backward_cuda(const RmsNormBackward& norm, Rows grad_weight, float* workspace,
                            void* stream) {
  if (norm.length == 0) return;
  cuda::check(cudaPeekAtLastError(), kBackwardOp);
  float* partials = grad_weight.data == nullptr ? nullptr : workspace;
  if (norm.rows > 0) {
    with_team(norm.length, {norm.x, norm.grad_out, norm.grad_sum, norm.grad_x}, norm.weight,
              [&](auto team, auto storage, bool aligned) {
      using Team = decltype(team);
      const int64_t rows = rows_of_group<Team>(norm.rows);
      backward_kernel<Team, decltype(storage)>
          <<<cuda::blocks_for<Team>(ceil_div(norm.rows, rows)), Team::kBlock, 0,
             cudaStream_t(stream)>>>(norm, rows, partials, aligned);
    });
    cuda::check(cudaGetLastError(), kBackwardOp);
  }
  if (grad_weight.data == nullptr) return;
  add_partials_kernel<<<unsigned(ceil_div(norm.length, kColumns)), kColumns * kShares, 0,
                        cudaStream_t(stream)>>>(
      partials, rms_norm_backward_workspace(norm) / norm.length, norm.length, grad_weight);
  cuda::check(cudaGetLastError(), kBackwardOp);
}

}  // namespace dsx
