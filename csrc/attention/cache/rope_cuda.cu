// rope on CUDA: a block has all heads of a few tokens, and works out the angles of each token once,
// while the first elements are on their way.
#include "attention/cache/rope.h"

#include <algorithm>

#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "attention/cache/rope_vectors_cuda.cuh"

namespace dsx {
namespace {

using cuda::is_aligned;
using cuda::kRowVector;
using cuda::kThreads;
using cuda::RowFloats;
using cuda::RowVector;

constexpr int kAtATime = 2;  // heads of a thread whose loads are under way together
constexpr int kMostTokens = 32, kMostAngles = 1024;  // that a block has at a time

// A block: `lanes` threads with the pairs of a head, for `heads` heads at a time, of some tokens.
struct Shape {
  int lanes, heads, tokens;

  __host__ __device__ int span() const { return lanes * kRowVector; }  // angles of a token
};

// The angles of the pairs from `first` on, a span for each token.
struct Angles {
  float cos[kMostAngles], sin[kMostAngles];

  __device__ void fill(const Rope& call, const Shape& block, int64_t first_token, int tokens,
                       int64_t first) {
    const int span = block.span();
    for (int a = threadIdx.x; a < tokens * span; a += blockDim.x) {
      const int token = a / span;
      const int64_t pair = first + (a - token * span), at = first_token + token;
      if (pair >= call.pairs) continue;
      const int64_t batch = call.batches == 1 ? 0 : at / call.tokens;
      const uint64_t position = position_of(call, batch, at - batch * call.tokens);
      const auto one = cuda::rotation_of(call.frequencies.at(pair), position, call.scale);
      cos[a] = one.cos.lanes[0];
      sin[a] = one.sin.lanes[0];
    }
  }
};

// The elements of 8 pairs of a head: the first of each, then the second; interleaved, as they lie.
template <class T>
struct PairVectors {
  RowVector<T> low, high;
};

// Where they are: `low` and `high` elements from number i and j on. Interleaved ones lie as far
// apart as all threads of the head reach, so that the accesses of a warp leave no gaps.
struct PairIndices {
  int64_t i, j;
  int low, high;
};
__device__ inline PairIndices indices_of(const Rope& call, const Shape& block, int64_t first,
                                         int lane) {
  const auto count_from = [](int64_t i, int64_t end) {
    return int(::max(int64_t(0), ::min(int64_t(kRowVector), end - i)));
  };
  if (!call.interleaved) {
    const int64_t pair = first + lane * kRowVector;
    const int count = count_from(pair, call.pairs);
    return {pair, call.pairs + pair, count, count};
  }
  const int64_t i = 2 * first + lane * kRowVector, j = i + block.span();
  return {i, j, count_from(i, 2 * call.pairs), count_from(j, 2 * call.pairs)};
}

// The angles of those pairs.
__device__ inline Rotation<RowFloats> rotation_at(const Rope& call, const Angles& angles,
                                                  const Shape& block, int token, int lane) {
  constexpr int kHalf = kRowVector / 2;
  const int span = block.span();
  const int low = token * span + (call.interleaved ? lane * kHalf : lane * kRowVector);
  const int high = low + (call.interleaved ? span / 2 : kHalf);
  Rotation<RowFloats> rotation;
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
    rotation.cos.lanes[k] = angles.cos[low + k];
    rotation.sin.lanes[k] = angles.sin[low + k];
    rotation.cos.lanes[k + kHalf] = angles.cos[high + k];
    rotation.sin.lanes[k + kHalf] = angles.sin[high + k];
  }
  return rotation;
}

// Pairs of interleaved elements become the first and the second ones; then the other way round.
__device__ inline void deinterleave(const RowFloats& low, const RowFloats& high, RowFloats& first,
                                    RowFloats& second) {
#pragma unroll
  for (int k = 0; k < kRowVector / 2; ++k) {
    first.lanes[k] = low.lanes[2 * k];
    second.lanes[k] = low.lanes[2 * k + 1];
    first.lanes[k + kRowVector / 2] = high.lanes[2 * k];
    second.lanes[k + kRowVector / 2] = high.lanes[2 * k + 1];
  }
}
__device__ inline void interleave(const RowFloats& first, const RowFloats& second, RowFloats& low,
                                  RowFloats& high) {
#pragma unroll
  for (int k = 0; k < kRowVector / 2; ++k) {
    low.lanes[2 * k] = first.lanes[k];
    low.lanes[2 * k + 1] = second.lanes[k];
    high.lanes[2 * k] = first.lanes[k + kRowVector / 2];
    high.lanes[2 * k + 1] = second.lanes[k + kRowVector / 2];
  }
}

// A head of a token: of q, or of k behind those.
struct HeadIndex {
  int64_t batch, token, head;

  template <class T>
  __device__ Pointer<T> in(const Heads& q, const Heads& k) const {
    return head < q.heads ? q.at<T>(batch, token, head) : k.at<T>(batch, token, head - q.heads);
  }
};

template <class T>
__device__ inline void rotate_pairs(const Rope& call, const Rotation<RowFloats>& rotation,
                                    const PairIndices& at, const PairVectors<T>& source,
                                    Pointer<T> target, bool aligned) {
  RowFloats first = floats_of(source.low), second = floats_of(source.high);
  if (call.interleaved) {
    const RowFloats low = first, high = second;
    deinterleave(low, high, first, second);
  }
  RowFloats low = rotated_first(first, second, rotation);
  RowFloats high = rotated_second(first, second, rotation);
  if (call.interleaved) {
    first = low;
    second = high;
    interleave(first, second, low, high);
  }
  if (at.low > 0) cuda::put<cuda::Stored::streamed>(target, at.i, at.low, aligned, low);
  if (at.high > 0) cuda::put<cuda::Stored::streamed>(target, at.j, at.high, aligned, high);
}

// What lies behind the pairs of a head, from this thread's part on.
template <class T>
__device__ inline void copy_behind(const Rope& call, Pointer<T> source, Pointer<T> target, int lane,
                                   int lanes, bool aligned) {
  for (int64_t i = 2 * call.pairs + lane * kRowVector; i < call.width; i += lanes * kRowVector) {
    const int count = int(::min(int64_t(kRowVector), call.width - i));
    cuda::put<cuda::Stored::streamed>(target, i, count, aligned,
                                      floats_of(cuda::fetch(source, i, count, aligned)));
  }
}

// Of a multiprocessor, at least: so that elements of 16 bits take no more than 64 registers.
template <class T>
constexpr int kBlocks = std::is_same_v<T, BFloat16> || std::is_same_v<T, Half> ? 4 : 2;

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    rope_kernel(const __grid_constant__ Rope call, const Shape block, bool aligned) {
  __shared__ __align__(16) Angles angles;
  const int lane = threadIdx.x % block.lanes, slot = threadIdx.x / block.lanes;
  const int64_t first_token = int64_t(blockIdx.x) * block.tokens;
  const int tokens = int(::min(int64_t(block.tokens), call.batches * call.tokens - first_token));
  const int64_t heads = call.q.heads + call.k.heads;
  const int64_t items = slot < block.heads ? tokens * heads : 0;  // of all threads, one by one
  const auto token_of = [&](int64_t item) { return block.tokens == 1 ? 0 : int(item / heads); };
  const auto head_of_item = [&](int64_t item, int token) {
    const int64_t at = first_token + token;
    const int64_t batch = call.batches == 1 ? 0 : at / call.tokens;
    return HeadIndex{batch, at - batch * call.tokens, item - token * heads};
  };
  for (int64_t first = 0; first < call.pairs; first += block.span()) {
    const PairIndices at = indices_of(call, block, first, lane);
    PairVectors<T> pairs[kAtATime];
    const auto fetch_items = [&](int64_t item) {
#pragma unroll
      for (int k = 0; k < kAtATime; ++k, item += block.heads) {
        if (item >= items) continue;
        const auto source = head_of_item(item, token_of(item)).template in<T>(call.q, call.k);
        if (at.low > 0) pairs[k].low = cuda::fetch(source, at.i, at.low, aligned);
        if (at.high > 0) pairs[k].high = cuda::fetch(source, at.j, at.high, aligned);
      }
    };
    fetch_items(slot);
    if (first > 0) __syncthreads();  // nobody reads the last ones any more
    angles.fill(call, block, first_token, tokens, first);
    __syncthreads();
    for (int64_t item = slot; item < items; item += kAtATime * block.heads) {
      if (item > slot) fetch_items(item);
#pragma unroll
      for (int k = 0; k < kAtATime; ++k) {
        const int64_t here = item + k * block.heads;
        if (here >= items) continue;
        const int token = token_of(here);
        const auto target = head_of_item(here, token).template in<T>(call.q_out, call.k_out);
        rotate_pairs(call, rotation_at(call, angles, block, token, lane), at, pairs[k], target,
                     aligned);
      }
    }
  }
  if (call.in_place || 2 * call.pairs == call.width) return;
  for (int64_t item = slot; item < items; item += block.heads) {
    const HeadIndex at = head_of_item(item, token_of(item));
    copy_behind(call, at.in<T>(call.q, call.k), at.in<T>(call.q_out, call.k_out), lane, block.lanes,
                aligned);
  }
}

// All heads of a token at a time, and more tokens where those are few and there are enough to keep
// the device busy.
Shape shape_of(const Rope& call) {
  const int64_t vectors = std::max<int64_t>(1, ceil_div(call.pairs, kRowVector));
  const int lanes = int(std::min<int64_t>(vectors, kMostAngles / kRowVector));
  const int64_t heads = call.q.heads + call.k.heads, at_a_time = kAtATime * (kThreads / lanes);
  const int64_t all_tokens = call.batches * call.tokens;
  const int64_t fitting = std::min(at_a_time / heads, int64_t(kMostAngles / (lanes * kRowVector)));
  const int tokens = int(std::clamp<int64_t>(std::min(fitting, all_tokens >> 11), 1, kMostTokens));
  const int64_t iterations = ceil_div(tokens * heads, at_a_time);
  return {lanes, int(ceil_div(tokens * heads, kAtATime * iterations)), tokens};
}

}  // namespace

void rope_cuda(const Rope& call, void* stream) {
  cuda::check(cudaPeekAtLastError(), "rope");  // of somebody before
  const bool aligned = is_aligned(call.q) && is_aligned(call.q_out) && is_aligned(call.k) &&
                       is_aligned(call.k_out) && call.pairs % kRowVector == 0;
  const bool same = !call.k.is_present() || call.k.dtype == call.q.dtype;
  const Shape shape = shape_of(call);
  const int threads = int(ceil_div(shape.lanes * shape.heads, cuda::kWarp)) * cuda::kWarp;
  const auto launch = [&](auto storage) {
    const int64_t blocks = ceil_div(call.batches * call.tokens, int64_t(shape.tokens));
    rope_kernel<decltype(storage)>
        <<<unsigned(blocks), threads, 0, cudaStream_t(stream)>>>(call, shape, aligned);
  };
  if (aligned && same && call.width % kRowVector == 0) {
    with_storage_type(call.q.dtype, launch);
  } else {
    launch(Any{});
  }
  cuda::check(cudaGetLastError(), "rope");
}

}  // namespace dsx
