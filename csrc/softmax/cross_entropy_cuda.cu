// cross_entropy on CUDA: a team of threads for each row.
#include "softmax/cross_entropy.h"

#include "common/cuda/check.h"
#include "softmax/twice_read_cuda.cuh"
#include "softmax/row_powers_cuda.cuh"

namespace dsx {

#include "softmax/cross_entropy_math.inl"

namespace {

using cuda::Floats;
using cuda::kRowVector;
using cuda::RowFloats;

// What a kernel works out of each row.
enum class Wanted { losses, losses_and_gradients, gradients };

// What the gradients of a row are made of.
struct Gradients {
  float shift, inverse, boost, share, hit, factor;
  int64_t target;

  // `length` is that of the row, `target` one of its columns, or sum is NaN.
  __device__ Gradients(const CrossEntropy& call, int64_t row, float largest, float sum)
      : target(call.targets[row]) {
    const float grad_loss =
        call.grad_loss == nullptr ? 1.0f : call.grad_loss[row * call.grad_loss_pitch];
    factor = grad_loss / *call.divisor;
    shift = largest;
    inverse = 1.0f / sum;
    boost = boost_of_row(Floats<1>(largest), Floats<1>(sum), call.z_loss).lanes[0];
    share = share_of_class(call.label_smoothing, call.length);
    hit = 1.0f - call.label_smoothing;
  }

  __device__ RowFloats of(const RowFloats& logits, int64_t i) const {
    RowFloats hits = 0.0f;
    if (target >= i && target < i + kRowVector) {
#pragma unroll
      for (int k = 0; k < kRowVector; ++k) {
        if (target == i + k) hits.lanes[k] = hit;
      }
    }
    const RowFloats probability = exp_of_negative(logits - RowFloats(shift)) * RowFloats(inverse);
    return grad_of_logit(probability, RowFloats(boost), RowFloats(share), hits, RowFloats(factor));
  }
};

template <class T>
__device__ float element_of(Pointer<T> row, int64_t i) {
  return cuda::load<cuda::Access::single, 1>(row + i, 1).lanes[0];
}

__device__ void write_loss(const CrossEntropy& call, int64_t row, float largest, float sum,
                           float of_target, float smoothing) {
  const Floats<1> loss = loss_of_row(Floats<1>(largest), Floats<1>(sum), Floats<1>(of_target),
                                     Floats<1>(smoothing), call.label_smoothing, call.z_loss);
  call.losses[row] = call.targets[row] == call.ignored ? 0.0f : loss.lanes[0];
  call.stats[row] = largest;
  call.stats[call.rows + row] = sum;
}

// The sum over classes of what label smoothing adds, in the pass that finds the largest logit:
// relative to the largest one so far. It only grows, so nothing cancels.
struct Smoothing {
  float share;
  float sum[1] = {};
  float shares = 0;  // of the classes so far

  // What was relative to one number is relative to a larger one then.
  __device__ void raise(float largest, float larger) {
    if (larger > largest && shares > 0) sum[0] += shares * (larger - largest);
  }

  // `before` was the largest one, `largest` is.
  __device__ void add(const RowFloats& logits, int count, float before, float largest) {
    raise(before, largest);
    shares += share * float(count);
    if (largest == -INFINITY) return;  // they are infinitely far from the first one that is more
    RowFloats terms = smoothing_of_class(RowFloats(largest), logits, RowFloats(share));
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) terms.lanes[k] = k < count ? terms.lanes[k] : 0.0f;
    sum[0] += cuda::sum_of_lanes(terms);
  }
};

template <class Team, class T, Wanted kWanted>
__global__ void __launch_bounds__(Team::kMostThreads, 2)
    rows_kernel(const __grid_constant__ CrossEntropy call, bool aligned) {
  using Column = cuda::Column<T>;
  using cuda::Kept;
  const int64_t row = ::min(Team::row(), call.rows - 1), target = call.targets[row];
  const bool is_there = Team::row() < call.rows, is_ignored = target == call.ignored;
  const Column length = Column(is_there ? call.length : 0);
  const Pointer<T> logits = call.logits.row<T>(row), grad = call.grad.row<T>(row);
  // Rows that are ignored are not read.
  const cuda::TwiceRead<Team, T, 1> reader{
      {logits}, 0, is_ignored ? Column(0) : length, length, aligned};
  const auto put_with = [&](const Gradients& gradients) {
    return [&, gradients](int, Column i, int count, const RowFloats(&x)[1], bool is_read) {
      const RowFloats result = is_read ? gradients.of(x[0], i) : RowFloats(0.0f);
      cuda::put<cuda::Stored::streamed>(grad, i, count, aligned, result);
    };
  };
  if constexpr (kWanted == Wanted::gradients) {
    const Gradients gradients(call, row, call.stats[row], call.stats[call.rows + row]);
    return reader.template read_first<Kept::no>(put_with(gradients));
  }
  const bool is_writer = Team::thread() == 0 && is_there;
  const bool is_in_row = target >= 0 && target < call.length;
  float of_target = NAN;  // read before gradients overwrite it
  if (is_writer && is_in_row) of_target = element_of(logits, target);
  __syncwarp();
  cuda::RowPowers powers;
  Smoothing smoothing{share_of_class(call.label_smoothing, call.length)};
  const bool is_smooth = call.label_smoothing > 0;
  constexpr Kept kKept = kWanted == Wanted::losses ? Kept::no : Kept::yes;
  reader.template read_first<kKept>(
      [&](int, Column, int count, const RowFloats(&x)[1], bool is_read) {
    if (!is_read) return;
    RowFloats scores = x[0];
    if (count < kRowVector) {
#pragma unroll
      for (int k = 0; k < kRowVector; ++k) {
        if (k >= count) scores.lanes[k] = -INFINITY;
      }
    }
    const float before = powers.largest;
    powers.add(scores);
    if (is_smooth) smoothing.add(x[0], count, before, powers.largest);
  });
  const float of_thread = powers.largest;
  powers.template add_over_team<Team>();
  if (is_smooth) {
    smoothing.raise(of_thread, powers.largest);
    cuda::add_over_team<Team>(smoothing.sum, 0);
  }
  const float sum = is_ignored ? 0.0f : is_in_row ? powers.sum : NAN;
  if (is_writer) {
    write_loss(call, row, is_ignored ? 0.0f : powers.largest, sum, of_target, smoothing.sum[0]);
  }
  if constexpr (kWanted == Wanted::losses_and_gradients) {
    reader.read_again(put_with(Gradients(call, row, powers.largest, sum)));
  }
}

constexpr int kThreads = 1024;  // of the kernels that are one block

// The sum over the threads of the block, in a fixed order.
template <class Number>
__device__ Number sum_of_block(Number mine) {
  __shared__ Number of_threads[kThreads];
  of_threads[threadIdx.x] = mine;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) of_threads[threadIdx.x] += of_threads[threadIdx.x + half];
  }
  __syncthreads();
  return of_threads[0];
}

__device__ void set_divisor(const CrossEntropy& call, float value, float* divisor) {
  *divisor = value;
  if (call.magnification != nullptr) *call.magnification = magnification_of(call, value);
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ CrossEntropy call, float* divisor) {
  unsigned long long mine = 0;
#pragma unroll 4  // loads in flight
  for (int64_t row = threadIdx.x; row < call.rows; row += kThreads) {
    mine += call.targets[row] != call.ignored;
  }
  const unsigned long long count = sum_of_block(mine);
  if (threadIdx.x == 0) set_divisor(call, float(count), divisor);
}

__global__ void set_kernel(const __grid_constant__ CrossEntropy call, float* divisor) {
  set_divisor(call, 1.0f, divisor);
}

__global__ void __launch_bounds__(kThreads)
    add_losses_kernel(const float* losses, int64_t rows, const float* divisor, float* loss) {
  double mine = 0;
#pragma unroll 4
  for (int64_t row = threadIdx.x; row < rows; row += kThreads) mine += double(losses[row]);
  const double sum = sum_of_block(mine);
  if (threadIdx.x == 0) *loss = float(sum / double(*divisor));
}

constexpr int kScaleThreads = 256;

// A block for each row, and then for another: most often there is nothing to do.
__global__ void __launch_bounds__(kScaleThreads)
    scale_kernel(Rows rows, int64_t count, int64_t length, RowFactors factors, bool aligned) {
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const float factor = factors.of(row);
    if (factor == 1) continue;
    const Pointer<Any> elements = rows.row<Any>(row);
    for (int64_t i = int64_t(threadIdx.x) * kRowVector; i < length;
         i += kScaleThreads * kRowVector) {
      const int here = int(::min(int64_t(kRowVector), length - i));
      const RowFloats values = cuda::fetch(elements, i, here, aligned).elements;
      cuda::put(elements, i, here, aligned, values * RowFloats(factor));
    }
  }
}

constexpr const char* kOp = "cross_entropy";

template <Wanted kWanted>
void launch_rows(const CrossEntropy& call, const char* op, void* stream) {
  if (call.rows == 0 || call.length == 0) return;
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  const auto rows = {call.logits, call.grad};
  const bool aligned = cuda::all_aligned(rows);
  const bool whole = cuda::are_whole(rows, call.length, call.logits.dtype);
  cuda::with_looping_team<4>(call.rows, call.length, whole, call.logits.dtype, op,
                             [&](auto team, auto storage, const cuda::TeamLaunch& launch) {
    rows_kernel<decltype(team), decltype(storage), kWanted>
        <<<launch.blocks, launch.threads, 0, cudaStream_t(stream)>>>(call, aligned);
  });
  cuda::check(cudaGetLastError(), op);
}

}  // namespace

void count_targets_cuda(const CrossEntropy& call, Reduction reduction, float* divisor,
                        void* stream) {
  cuda::check(cudaPeekAtLastError(), kOp);
  if (reduction == Reduction::mean) {
    count_kernel<<<1, kThreads, 0, cudaStream_t(stream)>>>(call, divisor);
  } else {
    set_kernel<<<1, 1, 0, cudaStream_t(stream)>>>(call, divisor);
  }
  cuda::check(cudaGetLastError(), kOp);
}

void cross_entropy_cuda(const CrossEntropy& call, void* stream) {
  if (!call.grad.is_present()) return launch_rows<Wanted::losses>(call, kOp, stream);
  launch_rows<Wanted::losses_and_gradients>(call, kOp, stream);
}

void cross_entropy_backward_cuda(const CrossEntropy& call, void* stream) {
  launch_rows<Wanted::gradients>(call, "cross_entropy_backward", stream);
}

void add_losses_cuda(const CrossEntropy& call, float* loss, void* stream) {
  add_losses_kernel<<<1, kThreads, 0, cudaStream_t(stream)>>>(call.losses, call.rows, call.divisor,
                                                              loss);
  cuda::check(cudaGetLastError(), kOp);
}

void scale_rows_cuda(Rows rows, int64_t count, int64_t length, RowFactors factors, void* stream) {
  constexpr const char* op = "cross_entropy_scale_";
  if (count == 0 || length == 0) return;
  cuda::check(cudaPeekAtLastError(), op);
  const unsigned blocks = unsigned(std::min<int64_t>(count, 1 << 14));
  scale_kernel<<<blocks, kScaleThreads, 0, cudaStream_t(stream)>>>(rows, count, length, factors,
                                                                   cuda::all_aligned({rows}));
  cuda::check(cudaGetLastError(), op);
}

}  // namespace dsx
