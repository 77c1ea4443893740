// The gradient of softmax on CUDA: likewise. A file of its own, so that both compile side by side.
#include "transformer/softmax.h"

#include "common/cuda/check.h"
#include "common/cuda/twice_read.cuh"

namespace dsx {

#include "transformer/softmax_math.inl"

namespace {

using cuda::Floats;
using cuda::kRowVector;
using Values = Floats<kRowVector>;

template <class Team, class T>
__global__ void __launch_bounds__(Team::kMostThreads)
    backward_kernel(const __grid_constant__ SoftmaxBackward softmax, bool aligned) {
  using Reader = cuda::TwiceRead<Team, T, 2>;
  const auto row_of = [&](int64_t row) {
    if (row >= softmax.rows) return typename Reader::Row{{}, 0, 0, 0};
    const Keys keys = keys_of(softmax.scores, row, softmax.length);
    return typename Reader::Row{{softmax.out.row<T>(row), softmax.grad_out.row<T>(row)},
                                keys.first,
                                keys.end,
                                softmax.length};
  };
  const float cap = softmax.scores.soft_cap;
  const Values scale = softmax.scores.scale;
  Reader reader(aligned);
  reader.begin(row_of(int64_t(blockIdx.x) * Team::kTeams + Team::team()));
  cuda::for_each_row_of_team<Team>(softmax.rows, [&](int64_t row, int64_t next, int turn) {
    const auto current = row_of(row), following = row_of(next);
    const int64_t place = ::min(row, softmax.rows - 1);
    const Pointer<T> x = softmax.x.row<T>(place), grad_x = softmax.grad_x.row<T>(place);
    float dots[1] = {};
    reader.first(current, following,
                 [&](int /*v*/, int64_t /*i*/, int /*count*/, const Values(&values)[2]) {
      dots[0] += cuda::sum_of_lanes(grad_term(values[0], values[1]));
    });
    cuda::add_over_team<Team>(dots, turn);
    const Values dot = dots[0];
    reader.second(current, following,
                  [&](int /*v*/, int64_t i, int count, const Values(&values)[2], bool is_read) {
      Values result = 0.0f;
      if (is_read) {
        result = grad_of_score(values[0], values[1], dot) * scale;
        if (x) {
          const Values score = floats_of(cuda::fetch(x, i, count, aligned)) * scale;
          const Values slope = slope_under_cap(score, cap);
          result = select(values[0] == Values(0.0f), Values(0.0f), result * slope);
        }
      }
      cuda::put(grad_x, i, count, aligned, result);
    });
  });
}

constexpr const char* kBackwardOp = "softmax_backward";

}  // namespace

void softmax_backward_cuda(const SoftmaxBackward& softmax, void* stream) {
  if (softmax.rows == 0 || softmax.length == 0) return;
  cuda::check(cudaPeekAtLastError(), kBackwardOp);
  const auto rows = {softmax.out, softmax.grad_out, softmax.x, softmax.grad_x};
  const bool whole = cuda::are_whole(rows, softmax.length, softmax.out.dtype);
  const bool aligned = cuda::all_aligned(rows);
  cuda::with_twice_read_team<2>(softmax.rows, softmax.length, whole, softmax.out.dtype, kBackwardOp,
                                [&](auto team, auto storage, const cuda::TwiceReadLaunch& launch) {
    const auto kernel = backward_kernel<decltype(team), decltype(storage)>;
    cuda::allow_shared_memory(kernel, launch, kBackwardOp);
    kernel<<<launch.blocks, launch.threads, launch.shared_bytes, cudaStream_t(stream)>>>(softmax,
                                                                                         aligned);
  });
  cuda::check(cudaGetLastError(), kBackwardOp);
}

}  // namespace dsx
