// rope on CUDA: a thread has 8 pairs of some heads of one token, so that their angles are worked
// out once for all of these.
#include "transformer/rope.h"

#include <algorithm>

#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/rows.cuh"

namespace dsx {

#include "transformer/rope_math.inl"

namespace {

using cuda::kRowVector;
using cuda::kThreads;
using cuda::RowVector;
using Values = cuda::Floats<kRowVector>;

constexpr int kAtATime = 2;  // heads whose loads are under way together

// A block: `lanes` threads with the pairs of a head, for `heads` heads at a time, of some tokens.
struct Shape {
  int lanes, heads, tokens;
};

// The angles of up to 8 pairs.
__device__ inline Rotation<Values> rotation_of(const Rope& call, uint64_t position, int64_t pair,
                                               int count) {
  Values rest(0.0f), quarter_cos(1.0f), quarter_sin(0.0f);
#pragma unroll
  for (int k = 0; k < kRowVector; ++k) {
    if (k >= count) continue;
    const double radians = call.frequencies.at(pair + k);
    const bool finite = is_finite(radians);
    const Angle angle = angle_at(position, finite ? in_turns(radians) : 0);
    rest.lanes[k] = finite ? angle.rest : float(radians - radians);
    quarter_cos.lanes[k] = angle.quarter_cos;
    quarter_sin.lanes[k] = angle.quarter_sin;
  }
  return rotation(rest, quarter_cos, quarter_sin, call.scale);
}

// The elements of 8 pairs of a head: the first of each, then the second; interleaved, as they lie.
template <class T>
struct PairVectors {
  RowVector<T> low, high;
};

// Where they are: `low` and `high` elements from number i and j on.
struct PairPlace {
  int64_t i, j;
  int low, high;
};
__device__ inline PairPlace place_of(const Rope& call, int64_t pair, int count) {
  if (!call.interleaved) return {pair, call.pairs + pair, count, count};
  const int both = 2 * count;
  return {2 * pair, 2 * pair + kRowVector, ::min(both, kRowVector), ::max(both - kRowVector, 0)};
}

// Pairs of interleaved elements as the first and the second ones, and the other way round.
__device__ inline void take_apart(const Values& low, const Values& high, Values& first,
                                  Values& second) {
#pragma unroll
  for (int k = 0; k < kRowVector / 2; ++k) {
    first.lanes[k] = low.lanes[2 * k];
    second.lanes[k] = low.lanes[2 * k + 1];
    first.lanes[k + kRowVector / 2] = high.lanes[2 * k];
    second.lanes[k + kRowVector / 2] = high.lanes[2 * k + 1];
  }
}
__device__ inline void put_together(const Values& first, const Values& second, Values& low,
                                    Values& high) {
#pragma unroll
  for (int k = 0; k < kRowVector / 2; ++k) {
    low.lanes[2 * k] = first.lanes[k];
    low.lanes[2 * k + 1] = second.lanes[k];
    high.lanes[2 * k] = first.lanes[k + kRowVector / 2];
    high.lanes[2 * k + 1] = second.lanes[k + kRowVector / 2];
  }
}

// A head of q, or of k behind those.
template <class T>
__device__ inline Pointer<T> head_at(const Heads& q, const Heads& k, int64_t batch, int64_t token,
                                     int64_t head) {
  return head < q.heads ? q.at<T>(batch, token, head) : k.at<T>(batch, token, head - q.heads);
}

template <class T>
__device__ inline void rotate_pairs(const Rope& call, const Rotation<Values>& rotation,
                                    const PairPlace& at, const PairVectors<T>& source,
                                    Pointer<T> target, bool aligned) {
  Values first = floats_of(source.low), second = floats_of(source.high);
  if (call.interleaved) {
    const Values low = first, high = second;
    take_apart(low, high, first, second);
  }
  Values low = rotated_first(first, second, rotation);
  Values high = rotated_second(first, second, rotation);
  if (call.interleaved) {
    first = low;
    second = high;
    put_together(first, second, low, high);
  }
  cuda::put(target, at.i, at.low, aligned, low);
  if (at.high > 0) cuda::put(target, at.j, at.high, aligned, high);
}

// What lies behind the pairs of a head, from this thread's share on.
template <class T>
__device__ inline void copy_behind(const Rope& call, Pointer<T> source, Pointer<T> target, int lane,
                                   int lanes, bool aligned) {
  for (int64_t i = 2 * call.pairs + lane * kRowVector; i < call.width; i += lanes * kRowVector) {
    const int count = int(::min(int64_t(kRowVector), call.width - i));
    cuda::put(target, i, count, aligned, floats_of(cuda::fetch(source, i, count, aligned)));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(const __grid_constant__ Rope call, const Shape block, bool aligned) {
  const int lane = threadIdx.x % block.lanes, slot = threadIdx.x / block.lanes;
  const int first_head = slot % block.heads;
  const int64_t token = int64_t(blockIdx.x) * block.tokens + slot / block.heads;
  if (slot / block.heads >= block.tokens || token >= call.batches * call.tokens) return;
  const int64_t batch = token / call.tokens, in_batch = token - batch * call.tokens;
  const uint64_t position = position_of(call, batch, in_batch);
  const int64_t heads = call.q.heads + call.k.heads;
  for (int64_t pair = lane * kRowVector; pair < call.pairs; pair += block.lanes * kRowVector) {
    const int count = int(::min(int64_t(kRowVector), call.pairs - pair));
    const PairPlace at = place_of(call, pair, count);
    const Rotation<Values> angles = rotation_of(call, position, pair, count);
    for (int64_t head = first_head; head < heads; head += kAtATime * block.heads) {
      PairVectors<T> pairs[kAtATime];
#pragma unroll
      for (int k = 0; k < kAtATime; ++k) {
        const int64_t here = head + k * block.heads;
        if (here >= heads) continue;
        const Pointer<T> source = head_at<T>(call.q, call.k, batch, in_batch, here);
        pairs[k].low = cuda::fetch(source, at.i, at.low, aligned);
        if (at.high > 0) pairs[k].high = cuda::fetch(source, at.j, at.high, aligned);
      }
#pragma unroll
      for (int k = 0; k < kAtATime; ++k) {
        const int64_t here = head + k * block.heads;
        if (here >= heads) continue;
        rotate_pairs(call, angles, at, pairs[k],
                     head_at<T>(call.q_out, call.k_out, batch, in_batch, here), aligned);
      }
    }
  }
  if (call.in_place || 2 * call.pairs == call.width) return;
  for (int64_t head = first_head; head < heads; head += block.heads) {
    copy_behind(call, head_at<T>(call.q, call.k, batch, in_batch, head),
                head_at<T>(call.q_out, call.k_out, batch, in_batch, head), lane, block.lanes,
                aligned);
  }
}

bool is_aligned(const Heads& heads) {
  const uint64_t bytes = uint64_t(bytes_of(heads.dtype));
  const uint64_t distances = uint64_t(heads.of_batch | heads.of_token | heads.of_head);
  return (uint64_t(reinterpret_cast<uintptr_t>(heads.data)) | distances * bytes) % 16 == 0;
}

// More heads for a thread where there are enough tokens to keep the device busy.
Shape shape_of(const Rope& call) {
  const int64_t vectors = std::max<int64_t>(1, ceil_div(call.pairs, kRowVector));
  const int lanes = int(std::min<int64_t>(vectors, cuda::kWarp));
  const int64_t heads = call.q.heads + call.k.heads;
  const int64_t threads = call.batches * call.tokens * heads * lanes;
  const int64_t of_thread = std::clamp<int64_t>(threads >> 17, 1, 8);
  const int at_a_time = int(std::min<int64_t>(ceil_div(heads, of_thread), kThreads / lanes));
  return {lanes, at_a_time, kThreads / (lanes * at_a_time)};
}

}  // namespace

void rope_cuda(const Rope& call, void* stream) {
  cuda::check(cudaPeekAtLastError(), "rope");  // of somebody before
  const bool aligned = is_aligned(call.q) && is_aligned(call.q_out) && is_aligned(call.k) &&
                       is_aligned(call.k_out) && call.pairs % kRowVector == 0;
  const bool same = call.k.data == nullptr || call.k.dtype == call.q.dtype;
  const Shape shape = shape_of(call);
  const auto launch = [&](auto storage) {
    const int64_t blocks = ceil_div(call.batches * call.tokens, int64_t(shape.tokens));
    rope_kernel<decltype(storage)>
        <<<unsigned(blocks), kThreads, 0, cudaStream_t(stream)>>>(call, shape, aligned);
  };
  if (aligned && same && call.width % kRowVector == 0) {
    with_storage_type(call.q.dtype, launch);
  } else {
    launch(Any{});
  }
  cuda::check(cudaGetLastError(), "rope");
}

}  // namespace dsx
