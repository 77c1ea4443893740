// The gradient of softmax on CUDA: likewise. A file of its own, so that both compile side by side.
#include "softmax/softmax.h"

#include "common/cuda/check.h"
#include "softmax/softmax_backward_streamed_cuda.cuh"
#include "softmax/twice_read_cuda.cuh"

namespace dsx {
namespace {

using cuda::Floats;
using cuda::kRowVector;
using cuda::RowFloats;

template <class Team, class T>
__global__ void __launch_bounds__(Team::kMostThreads, 2)
    backward_kernel(const __grid_constant__ SoftmaxBackward softmax, bool aligned) {
  using Column = cuda::Column<T>;
  const int64_t row = ::min(Team::row(), softmax.rows - 1);
  const Keys keys = keys_of(softmax.scores, row, softmax.length);
  const Pointer<T> x = softmax.x.row<T>(row), grad_x = softmax.grad_x.row<T>(row);
  const cuda::TwiceRead<Team, T, 2> reader{{softmax.out.row<T>(row), softmax.grad_out.row<T>(row)},
                                           Column(keys.first),
                                           Column(keys.end),
                                           Column(Team::row() < softmax.rows ? softmax.length : 0),
                                           aligned};
  float dots[1] = {}, total = 0;
  int part = 0;
  reader.template read_parts<cuda::Kept::yes>(
      [&](int, Column, int, const RowFloats(&values)[2], bool is_read) {
    if (is_read) dots[0] += cuda::sum_of_lanes(grad_term(values[0], values[1]));
  }, [&] {
    cuda::add_over_team<Team>(dots, part++);
    total += dots[0];
    dots[0] = 0;
  });
  const RowFloats dot = total, scale = softmax.scores.scale;
  reader.read_again([&](int, Column i, int count, const RowFloats(&values)[2], bool is_read) {
    RowFloats result = 0.0f;
    if (is_read) {
      result = grad_of_score(values[0], values[1], dot) * scale;
      if (x) {
        const RowFloats score = floats_of(cuda::fetch(x, i, count, aligned)) * scale;
        const RowFloats slope = slope_under_cap(score, softmax.scores.soft_cap);
        result = select(values[0] == RowFloats(0.0f), RowFloats(0.0f), result * slope);
      }
    }
    cuda::put<cuda::Stored::streamed>(grad_x, i, count, aligned, result);
  });
}

// Elements of a row that teams take in one iteration; shorter ones are faster as they are.
constexpr int64_t kReadInOneIteration =
    cuda::LoopingTeam<cuda::RowLength::of_one_iteration, 2>::kMostPerIteration;

}  // namespace

void softmax_backward_cuda(const SoftmaxBackward& softmax, void* stream) {
  if (softmax.rows == 0 || softmax.length == 0) return;
  cuda::check(cudaPeekAtLastError(), kBackwardOp);
  const auto rows = {softmax.out, softmax.grad_out, softmax.x, softmax.grad_x};
  const bool whole = cuda::are_whole(rows, softmax.length, softmax.out.dtype);
  const bool aligned = cuda::all_aligned(rows);
  const bool sees_all = softmax.scores.before < 0 && softmax.scores.after < 0;
  if (whole && sees_all && !softmax.x.is_present() && softmax.length > kReadInOneIteration &&
      softmax.out.dtype == Dtype::bfloat16 && run_streamed(softmax, cudaStream_t(stream))) {
    return;
  }
  cuda::with_looping_team<2, true>(softmax.rows, softmax.length, whole, softmax.out.dtype,
                                   kBackwardOp,
                                   [&](auto team, auto storage, const cuda::TeamLaunch& launch) {
    backward_kernel<decltype(team), decltype(storage)>
        <<<launch.blocks, launch.threads, 0, cudaStream_t(stream)>>>(softmax, aligned);
  });
  cuda::check(cudaGetLastError(), kBackwardOp);
}

}  // namespace dsx
