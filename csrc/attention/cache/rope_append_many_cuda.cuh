// rope_append_ of many tokens on CUDA, where heads lie so that 16 bytes can be accessed at a time:
// a block has a token, whose rotation it works out once, while the first heads are on their way. A
// thread has two vectors of every so many heads, those of the same eight pairs; so all that happens
// to a head happens in registers. The bits are those of the kernel for few tokens.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "common/cuda/chain.cuh"
#include "attention/cache/rope_append_head_cuda.cuh"
#include "attention/cache/rope_append_token_cuda.cuh"
#include "attention/cache/rope_vectors_cuda.cuh"

namespace dsx::cuda {

constexpr int kHeadsAtATime = 3;  // of a thread, whose loads are under way together
constexpr unsigned kAllLanes = 0xffffffff;

// What is the same for all heads of a token.
struct OfToken {
  alignas(16) float cos[kLargestAppendedWidth / 2];
  alignas(16) float sin[kLargestAppendedWidth / 2];
  alignas(16) float q_weight[kLargestAppendedWidth];  // with the offset
  alignas(16) float k_weight[kLargestAppendedWidth];

  __device__ void read_weight(const RopeAppend& call, const HeadWeight& weight, float* weights) {
    if (!weight.is_present()) return;
    with_stored_type(weight.dtype, [&](auto storage) {
      const auto* source = static_cast<const decltype(storage)*>(weight.data);
      for (int i = threadIdx.x; i < call.kv.width; i += blockDim.x) {
        weights[i] = widen(source[i]) + call.weight_offset;
      }
    });
  }
  __device__ void rotate_to(const RopeAppend& call, int64_t position) {
    for (int pair = threadIdx.x; pair < call.pairs; pair += blockDim.x) {
      const auto one = rotation_of(call.frequencies.at(pair), uint64_t(position), call.scale);
      cos[pair] = one.cos.lanes[0];
      sin[pair] = one.sin.lanes[0];
    }
  }
};

// By how much consecutive pairs are rotated. They lie at a multiple of 16 bytes, in shared memory.
template <int kCount>
__device__ inline Rotation<Floats<kCount>> rotation_at(const float* cos, const float* sin) {
  Rotation<Floats<kCount>> rotation;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    rotation.cos.lanes[k] = cos[k];
    rotation.sin.lanes[k] = sin[k];
  }
  return rotation;
}

// Rotates eight pairs: one vector has the first elements, the other one the second ones.
__device__ inline void rotate_halves(const float* cos, const float* sin, RowFloats& first,
                                     RowFloats& second) {
  const auto rotation = rotation_at<kRowVector>(cos, sin);
  const RowFloats a = first, b = second;
  first = rotated_first(a, b, rotation);
  second = rotated_second(a, b, rotation);
}

// Rotates four pairs, of which each lies side by side.
__device__ inline void rotate_neighbours(const float* cos, const float* sin, RowFloats& pairs) {
  constexpr int kPairs = kRowVector / 2;
  Floats<kPairs> first, second;
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    first.lanes[k] = pairs.lanes[2 * k];
    second.lanes[k] = pairs.lanes[2 * k + 1];
  }
  const auto rotation = rotation_at<kPairs>(cos, sin);
  const Floats<kPairs> a = rotated_first(first, second, rotation);
  const Floats<kPairs> b = rotated_second(first, second, rotation);
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    pairs.lanes[2 * k] = a.lanes[k];
    pairs.lanes[2 * k + 1] = b.lanes[k];
  }
}

// The heads of a token, `step` elements from one to the next.
template <class T>
struct TokenHeads {
  T* first;
  int step;
};

// One of them, which begins so many elements behind the first one.
template <class T>
struct HeadPlace {
  T* first;
  int begin;

  __device__ HeadPlace(const TokenHeads<T>& heads, int head)
      : first(heads.first), begin(head * heads.step) {}
  __device__ Pointer<T> vector(int i) const { return {first + (begin + i * kRowVector)}; }
};

template <class T>
struct HeadVectors {
  RowVector<T> low, high;
};

// What a lane has of a head, of which `lanes` lanes have all, a power of 2: two vectors, which it
// calls low and high. Of what is rotated by halves they are `apart` vectors apart.
class HeadLane {
 public:
  __device__ HeadLane(const RopeAppend& call, int lanes)
      : lanes_(lanes),
        lane_(int(threadIdx.x) & (lanes - 1)),
        apart_(call.interleaved || call.pairs == 0 ? lanes : int(call.pairs) / kRowVector),
        low_(lane_ < apart_ ? lane_ : 2 * lane_),
        high_(lane_ < apart_ ? lane_ + apart_ : 2 * lane_ + 1),
        vectors_(int(call.kv.width) / kRowVector),
        rotated_(int(call.pairs) * 2 / kRowVector) {}

  // What is behind the head is 0.
  template <class T>
  __device__ HeadVectors<T> read(const HeadPlace<T>& head) const {
    HeadVectors<T> vectors = {};
    if (low_ < vectors_) vectors.low = fetch(head.vector(low_), 0, kRowVector, true);
    if (high_ < vectors_) vectors.high = fetch(head.vector(high_), 0, kRowVector, true);
    return vectors;
  }
  template <class T>
  __device__ void write(const HeadPlace<T>& head, const RowFloats& low,
                        const RowFloats& high) const {
    if (low_ < vectors_) put(head.vector(low_), 0, kRowVector, true, low);
    if (high_ < vectors_) put(head.vector(high_), 0, kRowVector, true, high);
  }
  template <class Kind>
  __device__ void write(const HeadPlace<uint8_t>& head, float* scale, const Codes<Kind>& codes,
                        const RowFloats& low, const RowFloats& high) const {
    if (low_ < vectors_) write_codes(head.vector(low_), codes, low);
    if (high_ < vectors_) write_codes(head.vector(high_), codes, high);
    if (lane_ == 0) *scale = codes.scale;
  }

  // All lanes of a warp call this, also those of other heads.
  __device__ float sum_of_squares(const RowFloats& low, const RowFloats& high) const {
    const float of_low = sum_of_lanes(low * low), of_high = sum_of_lanes(high * high);
    float sum = of_vector(lane_, of_low, of_high) + of_vector(lane_ + lanes_, of_low, of_high);
    for (int bit = lanes_ / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(kAllLanes, sum, bit);
    return sum;
  }
  __device__ float largest(const RowFloats& low, const RowFloats& high) const {
    float largest = 0;
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) {
      largest = dsx::max(largest, ::fabsf(low.lanes[k]));
      largest = dsx::max(largest, ::fabsf(high.lanes[k]));
    }
    for (int bit = lanes_ / 2; bit > 0; bit /= 2) {
      largest = dsx::max(largest, __shfl_xor_sync(kAllLanes, largest, bit));
    }
    return largest;
  }

  __device__ void multiply(float factor, const float* weights, RowFloats& low,
                           RowFloats& high) const {
    const auto weights_of = [&](int vector) {
      const auto at = Pointer<float>{const_cast<float*>(weights) + vector * kRowVector};
      return load<Access::vector, kRowVector>(at, kRowVector);
    };
    if (low_ < vectors_) low = low * RowFloats(factor) * weights_of(low_);
    if (high_ < vectors_) high = high * RowFloats(factor) * weights_of(high_);
  }

  __device__ void rotate(const RopeAppend& call, const OfToken& token, RowFloats& low,
                         RowFloats& high) const {
    const auto rotate_one = [&](int vector, RowFloats& elements) {
      const int pair = vector * kRowVector / 2;
      if (vector < rotated_) rotate_neighbours(token.cos + pair, token.sin + pair, elements);
    };
    if (call.interleaved) {
      rotate_one(low_, low);
      rotate_one(high_, high);
    } else if (low_ < rotated_) {
      const int pair = low_ * kRowVector;
      rotate_halves(token.cos + pair, token.sin + pair, low, high);
    }
  }

 private:
  template <class Kind>
  __device__ static void write_codes(Pointer<uint8_t> target, const Codes<Kind>& codes,
                                     const RowFloats& values) {
    Elements<uint8_t, kRowVector> bytes;
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) bytes.lanes[k] = codes.of(values.lanes[k]);
    store_elements<Access::vector>(target.address, bytes, kRowVector);
  }

  // What the lane that has this vector has found of it.
  __device__ float of_vector(int vector, float of_low, float of_high) const {
    const bool is_alone = vector >= 2 * apart_;  // with the next one, not with one so far apart
    const int lane = is_alone ? vector / 2 : vector < apart_ ? vector : vector - apart_;
    const bool is_low = is_alone ? vector % 2 == 0 : vector < apart_;
    const float low = __shfl_sync(kAllLanes, of_low, lane, lanes_);
    const float high = __shfl_sync(kAllLanes, of_high, lane, lanes_);
    return is_low ? low : high;
  }

  const int lanes_, lane_, apart_, low_, high_;
  const int vectors_, rotated_;  // of a head
};

template <class T>
__device__ inline TokenHeads<T> heads_of(const Heads& heads, const AppendedToken& token) {
  return {heads.at<T>(token.batch, token.number, 0).address, int(heads.of_head)};
}

// Where its keys and values go.
template <class Kind, class T>
class CachePlaces {
  using Stored = std::conditional_t<Kind::kQuantized, uint8_t, T>;

 public:
  __device__ CachePlaces(const PagedKv& kv, const AppendedToken& token)
      : is_there_(token.page >= 0) {
    const int row = token.position % kPageTokens;
    const int64_t place = kv.place(token.page, 0, row);
    keys_ = {static_cast<Stored*>(kv.keys) + place, int(kv.of_head)};
    values_ = {static_cast<Stored*>(kv.values) + place, int(kv.of_head)};
    if constexpr (Kind::kQuantized) {
      const int64_t scale = kv.scale_place(token.page, 0, row);
      key_scales_ = kv.key_scales + scale;
      value_scales_ = kv.value_scales + scale;
    }
  }

  // Of codes, `largest` is the largest element of the head.
  __device__ void write(const HeadLane& lane, const HeadOfToken<int>& head, float largest,
                        const RowFloats& low, const RowFloats& high) const {
    if (!is_there_) return;
    const HeadPlace place(head.of_k ? keys_ : values_, head.head);
    if constexpr (Kind::kQuantized) {
      float* const scales = head.of_k ? key_scales_ : value_scales_;
      lane.write(place, scales + head.head * kPageTokens, Codes<Kind>(largest), low, high);
    } else {
      lane.write(place, low, high);
    }
  }

 private:
  const bool is_there_;
  TokenHeads<Stored> keys_, values_;
  float *key_scales_, *value_scales_;
};

// Normalises and rotates it.
__device__ inline void work_on(const RopeAppend& call, const OfToken& of_token,
                               const HeadLane& lane, const HeadOfToken<int>& head, RowFloats& low,
                               RowFloats& high) {
  if (call.q_weight.is_present() || call.k_weight.is_present()) {
    const float factor = norm_factor(call, lane.sum_of_squares(low, high));
    if (head.choose(call.q_weight, call.k_weight, HeadWeight{}).is_present()) {
      lane.multiply(factor, head.of_q ? of_token.q_weight : of_token.k_weight, low, high);
    }
  }
  if (head.of_q || head.of_k) lane.rotate(call, of_token, low, high);
}

// So that 1024 threads of a multiprocessor have elements of 16 bits under way.
constexpr int kMostAppending = 512;
template <class T>
constexpr int kAppendingBlocks = sizeof(T) == 2 ? 2 : 1;

// A block has some heads of a token, for all tokens one after the other, then some more of each.
template <class Kind, class T>
__global__ void __launch_bounds__(kMostAppending, kAppendingBlocks<T>)
    append_many_kernel(const __grid_constant__ RopeAppend call, unsigned tokens, int lanes) {
  __shared__ OfToken of_token;
  const HeadLane lane(call, lanes);
  const int shift = __ffs(lanes) - 1, slots = int(blockDim.x) >> shift;
  int first = int(threadIdx.x) >> shift;
  unsigned row = blockIdx.x;
  for (; row >= tokens; row -= tokens) first += kHeadsAtATime * slots;
  const int heads = int(call.q.heads + 2 * call.kv.heads);
  AppendedToken token(call, row);
  const auto q = heads_of<T>(call.q, token);
  const auto k = heads_of<T>(call.k, token);
  const auto v = heads_of<T>(call.v, token);
  HeadVectors<T> read[kHeadsAtATime];
#pragma unroll
  for (int i = 0; i < kHeadsAtATime; ++i) {
    const int number = first + i * slots;
    const HeadOfToken head(call, number);
    if (number < heads) read[i] = lane.read(HeadPlace(head.choose(q, k, v), head.head));
  }
  of_token.read_weight(call, call.q_weight, of_token.q_weight);
  of_token.read_weight(call, call.k_weight, of_token.k_weight);
  const bool tells = blockIdx.x < tokens && threadIdx.x == 0;
  if (!token.find_place(call, tells)) return;
  of_token.rotate_to(call, token.position);
  token.tell_of_page(call, tells);
  const auto q_out = heads_of<T>(call.q_out, token);
  const CachePlaces<Kind, T> cache(call.kv, token);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kHeadsAtATime; ++i) {
    const int number = first + i * slots;
    const HeadOfToken head(call, number);
    RowFloats low = floats_of(read[i].low), high = floats_of(read[i].high);
    work_on(call, of_token, lane, head, low, high);
    float largest = 0;
    if constexpr (Kind::kQuantized) {
      if (__any_sync(kAllLanes, !head.of_q)) largest = lane.largest(low, high);
    }
    if (number >= heads) continue;
    if (head.of_q) {
      lane.write(HeadPlace(q_out, head.head), low, high);
    } else {
      cache.write(lane, head, largest, low, high);
    }
  }
}

// Whether it can do this: all heads are of one type and aligned, pairs fill vectors, and those of a
// token are not so far apart that the distance takes 64 bits.
template <class Kind>
bool can_append_by_vectors(const RopeAppend& call) {
  const auto are_near = [](int64_t heads, int64_t of_head) {
    return heads <= INT32_MAX / 4 && std::abs(of_head) <= INT32_MAX / (heads + 1);
  };
  const PagedKv& kv = call.kv;
  for (const Heads* heads : {&call.q, &call.k, &call.v, &call.q_out}) {
    if (heads->dtype != call.q.dtype || !is_aligned(*heads)) return false;
    if (!are_near(heads->heads, heads->of_head)) return false;
  }
  if (!Kind::kQuantized && kv.dtype != call.q.dtype) return false;
  const int64_t bytes = Kind::kQuantized ? 1 : bytes_of(kv.dtype);
  const uint64_t distances = uint64_t((kv.of_page | kv.of_head | kv.of_token) * bytes);
  const uint64_t places = uint64_t(reinterpret_cast<uintptr_t>(kv.keys)) |
                          uint64_t(reinterpret_cast<uintptr_t>(kv.values));
  return (distances | places) % uint64_t(kRowVector * std::min<int64_t>(bytes, 2)) == 0 &&
         are_near(kv.heads, kv.of_head) && kv.width % kRowVector == 0 &&
         call.pairs * (call.interleaved ? 2 : 1) % kRowVector == 0;
}

// How a launch is cut: a block has all heads of a token, if they are not too many.
struct ManyShape {
  int lanes, threads;
  int64_t blocks_of_token;

  explicit ManyShape(const RopeAppend& call)
      : lanes(int(std::bit_ceil(unsigned(ceil_div(call.kv.width, 2 * kRowVector))))) {
    const int64_t heads = call.q.heads + 2 * call.kv.heads;
    const int64_t most = kHeadsAtATime * (kMostAppending / lanes);
    blocks_of_token = ceil_div(heads, most);
    const int64_t slots = ceil_div(heads, kHeadsAtATime * blocks_of_token);
    threads = int(ceil_div(slots * lanes, kWarp)) * kWarp;
  }
};

template <class Kind>
void append_by_vectors(const RopeAppend& call, const ManyShape& shape, void* stream,
                       const char* op) {
  const unsigned tokens = unsigned(call.news.batches * call.news.tokens);
  const unsigned blocks = tokens * unsigned(shape.blocks_of_token);
  with_storage_type(call.q.dtype, [&](auto storage) {
    launch_kernel(append_many_kernel<Kind, decltype(storage)>, {blocks, shape.threads, 0, 1, false},
                  cudaStream_t(stream), op, call, tokens, shape.lanes);
  });
}

}  // namespace dsx::cuda
