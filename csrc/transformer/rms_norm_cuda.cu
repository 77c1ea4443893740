// rms_norm on CUDA: each team of threads takes a few rows one after the other. When the gradient of
// the weight is wanted, a block adds it up over its rows, and a small kernel then adds the blocks.
#include "transformer/rms_norm.h"

#include "common/cuda/add_partials.cuh"
#include "common/cuda/check.h"
#include "common/cuda/rows.cuh"

namespace dsx {

#include "transformer/rms_norm_math.inl"

namespace {

using cuda::Floats;
using cuda::kRowVector;
using cuda::RowVector;
using Values = Floats<kRowVector>;

// What a thread has of a row: in registers, or to be read again each time.
template <class Team, class T, bool kHeld = (Team::kVectors > 0)>
struct HeldRow {
  RowVector<T> vectors[kHeld ? Team::kVectors : 1];

  __device__ void fetch(Pointer<T> row, int64_t length, bool aligned) {
    if constexpr (kHeld) {
      cuda::for_each_row_vector<Team>(length, [&](int v, int64_t i, int count) {
        vectors[v] = cuda::fetch(row, i, count, aligned);
      });
    }
  }

  __device__ Values get(Pointer<T> row, int v, int64_t i, int count, bool aligned) const {
    if constexpr (kHeld) return floats_of(vectors[v]);
    return floats_of(cuda::fetch(row, i, count, aligned));
  }
};

// The weight, or ones. It is in the cache after the first row.
template <class Team, class W, bool kHeld = (Team::kVectors > 0)>
struct HeldWeight {
  Pointer<W> weight;
  HeldRow<Team, W, kHeld> held;

  __device__ void fetch(int64_t length, bool aligned) {
    if (weight) held.fetch(weight, length, aligned);
  }

  __device__ Values get(int v, int64_t i, int count, bool aligned) const {
    return weight ? held.get(weight, v, i, count, aligned) : Values(1.0f);
  }
};

// A block takes `rows_of_team` rows with each of its teams: all of them take neighbours at a time,
// so that they find each other's memory near. Calls body(row, length, next, turn) for each row of
// this thread's team and number of that row; length is 0 for a row beyond the end, as all threads
// of a block must meet, and `next` is negative if no row follows.
template <class Team, class Body>
__device__ void for_each_row(int64_t rows, int64_t length, int rows_of_team, const Body& body) {
  int64_t row = int64_t(blockIdx.x) * rows_of_team * Team::kTeams + Team::team();
#pragma unroll 1
  for (int turn = 0; turn < rows_of_team; ++turn, row += Team::kTeams) {
    const bool last = turn + 1 == rows_of_team || row + Team::kTeams >= rows;
    body(::min(row, rows - 1), row < rows ? length : 0, last ? -1 : row + Team::kTeams, turn);
  }
}

template <class Team, class T, class W>
__global__ void __launch_bounds__(Team::kMostThreads)
    norm_kernel(const __grid_constant__ RmsNorm norm, int rows_of_team, bool aligned) {
  const auto body = [&](int64_t row, int64_t length, int64_t next, int turn) {
    const Pointer<T> out = norm.out.row<T>(row);
    const Pointer<T> residual = norm.residual.row<T>(row), sum = norm.sum.row<T>(row);
    Pointer<T> x = norm.x.row<T>(row);
    HeldRow<Team, T> held, held_residual;
    HeldWeight<Team, W> weight{norm.weight.row<W>(0), {}};
    held.fetch(x, length, aligned);
    if (residual) held_residual.fetch(residual, length, aligned);
    weight.fetch(length, aligned);
    if (next >= 0) {
      cuda::fetch_ahead<Team>(norm.x.row<T>(next), length);
      if (residual) cuda::fetch_ahead<Team>(norm.residual.row<T>(next), length);
    }
    float squares[1] = {};
    cuda::for_each_row_vector<Team>(length, [&](int v, int64_t i, int count) {
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
    cuda::add_over_team<Team>(squares, turn);
    const float n = float(norm.length);
    const Values inverse = inverse_rms(Floats<1>(squares[0]), n, norm.eps).lanes[0];
    cuda::for_each_row_vector<Team>(length, [&](int v, int64_t i, int count) {
      const Values value = held.get(x, v, i, count, aligned);
      cuda::put(out, i, count, aligned,
                normalized(value, inverse, weight.get(v, i, count, aligned)));
    });
  };
  for_each_row<Team>(norm.rows, norm.length, rows_of_team, body);
}

// The gradient of the weight over the rows of a block: in registers, or in memory if there may be
// more of it than a thread can hold.
template <class Team>
struct Partial {
  static constexpr int kVectors = Team::kShort ? 1 : Team::kVectors;
  Values totals[kVectors > 0 ? kVectors : 1] = {};
  float* memory = nullptr;  // [length] written; null: not wanted

  __device__ void add(const Values& term, int turn, int v, int64_t i, int count) {
    if constexpr (kVectors > 0) {
      totals[v] = totals[v] + term;
    } else if (memory != nullptr) {
      const Pointer<float> total{memory + i};
      constexpr cuda::Access kSingle = cuda::Access::single;
      const Values before =
          turn == 0 ? Values(0.0f) : cuda::load<kSingle, kRowVector>(total, count);
      cuda::store<kSingle>(total, before + term, count);
    }
  }

  __device__ void finish(int64_t length) const {
    if (kVectors == 0 || memory == nullptr) return;
    if constexpr (Team::kShort) {
      __shared__ float of_teams[Team::kTeams][cuda::kShortRow];
#pragma unroll
      for (int k = 0; k < kRowVector; ++k) {
        of_teams[Team::team()][Team::thread() * kRowVector + k] = totals[0].lanes[k];
      }
      __syncthreads();
      if (int(threadIdx.x) >= length) return;
      float sum = 0;
#pragma unroll
      for (int team = 0; team < Team::kTeams; ++team) sum += of_teams[team][threadIdx.x];
      memory[threadIdx.x] = sum;
    } else {
      cuda::for_each_row_vector<Team>(length, [&](int v, int64_t i, int count) {
        cuda::put(Pointer<float>{memory + i}, 0, count, true, totals[v]);
      });
    }
  }
};

// What each thread of a team can hold beside the row, its gradient and that of the weight.
template <class Team, class T>
constexpr bool kHasRoomFor = Team::kVectors > 0 && sizeof(T) == 2;

template <class Team, class T, class W>
__global__ void __launch_bounds__(Team::kMostThreads)
    backward_kernel(const __grid_constant__ RmsNormBackward norm, int rows_of_team,
                    float* partials,  // [blocks, length] written; null: not wanted
                    bool aligned) {
  Partial<Team> partial;
  partial.memory = partials == nullptr ? nullptr : partials + int64_t(blockIdx.x) * norm.length;
  const auto body = [&](int64_t row, int64_t length, int64_t next, int turn) {
    const Pointer<T> x = norm.x.row<T>(row), grad_out = norm.grad_out.row<T>(row);
    const Pointer<T> grad_x = norm.grad_x.row<T>(row), grad_sum = norm.grad_sum.row<T>(row);
    HeldRow<Team, T> held_x, held_grad;
    HeldRow<Team, T, kHasRoomFor<Team, T>> held_grad_sum;
    HeldWeight<Team, W, kHasRoomFor<Team, W>> weight{norm.weight.row<W>(0), {}};
    held_x.fetch(x, length, aligned);
    held_grad.fetch(grad_out, length, aligned);
    weight.fetch(length, aligned);
    if (grad_sum) held_grad_sum.fetch(grad_sum, length, aligned);
    if (next >= 0) {
      cuda::fetch_ahead<Team>(norm.x.row<T>(next), length);
      cuda::fetch_ahead<Team>(norm.grad_out.row<T>(next), length);
      if (grad_sum) cuda::fetch_ahead<Team>(norm.grad_sum.row<T>(next), length);
    }
    float sums[2] = {};
    cuda::for_each_row_vector<Team>(length, [&](int v, int64_t i, int count) {
      const Values value = held_x.get(x, v, i, count, aligned);
      const Values grad = held_grad.get(grad_out, v, i, count, aligned);
      sums[0] += cuda::sum_of_lanes(value * value);
      sums[1] += cuda::sum_of_lanes(value * (grad * weight.get(v, i, count, aligned)));
    });
    cuda::add_over_team<Team>(sums, turn);
    const float n = float(norm.length);
    const Floats<1> one_inverse = inverse_rms(Floats<1>(sums[0]), n, norm.eps);
    const Values share = rms_share(Floats<1>(sums[1]), one_inverse, n).lanes[0];
    const Values inverse = one_inverse.lanes[0];
    cuda::for_each_row_vector<Team>(length, [&](int v, int64_t i, int count) {
      const Values value = held_x.get(x, v, i, count, aligned);
      const Values grad = held_grad.get(grad_out, v, i, count, aligned);
      const Values weighted = grad * weight.get(v, i, count, aligned);
      Values result = grad_of_x(value, weighted, inverse, share);
      if (grad_sum) result = result + held_grad_sum.get(grad_sum, v, i, count, aligned);
      cuda::put(grad_x, i, count, aligned, result);
      partial.add(grad_of_weight(value, grad, inverse), turn, v, i, count);
    });
  };
  for_each_row<Team>(norm.rows, norm.length, rows_of_team, body);
  partial.finish(norm.length);
}

constexpr const char* kOp = "rms_norm";
constexpr const char* kBackwardOp = "rms_norm_backward";

// Blocks of a kernel, and the rows that each team of a block takes one after the other.
struct Grid {
  int64_t blocks;
  int threads, rows_of_team;

  Grid(const cuda::RowBlock& block, int64_t rows, int64_t rows_of_each)
      : blocks(ceil_div(rows, rows_of_each * block.teams)),
        threads(block.threads),
        rows_of_team(int(rows_of_each)) {}
};

// A few rows, so that the next one can be fetched ahead, where that leaves blocks for every
// multiprocessor.
Grid forward_grid(const RmsNorm& norm) {
  const cuda::RowBlock block(norm.length);
  const int64_t all_threads = ceil_div(norm.rows, block.teams) * block.threads;
  return {block, norm.rows, std::clamp<int64_t>(all_threads >> 20, 1, 4)};
}

// Blocks that a large device runs all at once, whatever the device: the gradient of the weight
// depends on their number. A float adds up 256 rows at the most.
Grid backward_grid(const RmsNormBackward& norm) {
  const cuda::RowBlock block(norm.length);
  const int resident_threads = block.teams > 1 ? 1024 : 512;  // as they need registers
  const int64_t teams = 128 * (resident_threads / block.threads) * block.teams;
  return {block, norm.rows, std::clamp<int64_t>(ceil_div(norm.rows, teams), 1, 256)};
}

// Calls body(team, storage, storage of the weight, aligned).
template <class Body>
void with_team(int64_t length, std::initializer_list<Rows> rows, const Rows& weight,
               const Body& body) {
  const Rows& first = *rows.begin();
  const bool aligned = cuda::all_aligned(rows) && cuda::all_aligned({weight});
  const bool same = std::all_of(rows.begin(), rows.end(), [&](const Rows& each) {
    return each.data == nullptr || each.dtype == first.dtype;
  });
  cuda::with_row_team(
      length, aligned && same && length % kRowVector == 0, first, weight,
      [&](auto team, auto storage, auto weights) { body(team, storage, weights, aligned); });
}

}  // namespace

void rms_norm_cuda(const RmsNorm& norm, void* stream) {
  if (norm.rows == 0 || norm.length == 0) return;
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  const Grid grid = forward_grid(norm);
  with_team(norm.length, {norm.x, norm.residual, norm.sum, norm.out}, norm.weight,
            [&](auto team, auto storage, auto weights, bool aligned) {
    norm_kernel<decltype(team), decltype(storage), decltype(weights)>
        <<<unsigned(grid.blocks), grid.threads, 0, cudaStream_t(stream)>>>(norm, grid.rows_of_team,
                                                                           aligned);
  });
  cuda::check(cudaGetLastError(), kOp);
}

int64_t rms_norm_backward_workspace(const RmsNormBackward& norm) {
  return backward_grid(norm).blocks * norm.length;
}

void rms_norm_backward_cuda(const RmsNormBackward& norm, Rows grad_weight, float* workspace,
                            void* stream) {
  if (norm.length == 0) return;
  cuda::check(cudaPeekAtLastError(), kBackwardOp);
  const Grid grid = backward_grid(norm);
  float* partials = grad_weight.data == nullptr ? nullptr : workspace;
  if (norm.rows > 0) {
    with_team(norm.length, {norm.x, norm.grad_out, norm.grad_sum, norm.grad_x}, norm.weight,
              [&](auto team, auto storage, auto weights, bool aligned) {
      backward_kernel<decltype(team), decltype(storage), decltype(weights)>
          <<<unsigned(grid.blocks), grid.threads, 0, cudaStream_t(stream)>>>(
              norm, grid.rows_of_team, partials, aligned);
    });
    cuda::check(cudaGetLastError(), kBackwardOp);
  }
  if (grad_weight.data == nullptr) return;
  cuda::add_partials(partials, grid.blocks, norm.length, grad_weight, kBackwardOp,
                     cudaStream_t(stream));
}

}  // namespace dsx
