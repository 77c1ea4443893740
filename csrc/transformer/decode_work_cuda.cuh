// How the blocks of decode_attention share its work, and where they leave what they have found.
#pragma once

#include "common/cuda/vector_io.cuh"
#include "transformer/decode_attention.h"

namespace dsx {

#include "transformer/softmax_math.inl"

namespace cuda {

constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps;

// a / b of numbers below 2^32, in a fifth of the instructions that 64 bits take.
__device__ inline int64_t quotient(int64_t a, int64_t b) { return uint32_t(a) / uint32_t(b); }

// What is put together in the end, of a row in a chunk: its floats, then `sum` and `largest`.
struct Partials {
  float* data;
  int64_t chunks, rows, floats;  // of a head, of a chunk, of a row

  Partials(const DecodeAttention& call, void* workspace)
      : data(static_cast<float*>(workspace)),
        chunks((call.kv.pages_of_slot + kChunkPages - 1) / kChunkPages),
        rows(call.rows()),
        floats(partial_floats(call.kv.width)) {}

  __device__ float* at(int64_t batch, int64_t heads, int64_t head, int64_t chunk,
                       int64_t row) const {
    return data + (((batch * heads + head) * chunks + chunk) * rows + row) * floats;
  }
};

// A unit of work: for each row of the batch, its heads, for each its chunks, for each `parts`.
struct Unit {
  Sequence sequence;
  int64_t batch, head, chunk, part;
};

// Goes through a range of units. The host does not know how many there are.
class Units {
 public:
  __device__ Units(const DecodeAttention& call, int64_t parts) : call_(call), parts_(parts) {}

  // Finds the share of this block: every thread calls it; `sums` is shared memory.
  __device__ void find_share(int64_t (&sums)[kDecodeWarps]) {
    const int64_t total = add_up(sums, -1);
    const int64_t blocks = gridDim.x, block = blockIdx.x;
    next_ = total / blocks * block + ::min(block, total % blocks);
    end_ = next_ + total / blocks + (block < total % blocks);
    if (next_ < end_) add_up(sums, next_);
  }

  __device__ bool done() const { return next_ >= end_; }

  __device__ Unit take() {
    while (next_ >= first_ + count_) enter(batch_ + 1, first_ + count_);
    const int64_t i = next_++ - first_, chunks = chunks_.end - chunks_.first;
    const int64_t of_parts = quotient(i, parts_), head = quotient(of_parts, chunks);
    return {sequence_, batch_, head, chunks_.first + of_parts - head * chunks,
            i - of_parts * parts_};
  }

 private:
  __device__ int64_t count_of(const Sequence& sequence) const {
    const Chunks chunks = chunks_of(sequence, call_.window);
    return (chunks.end - chunks.first) * call_.kv.heads * parts_;
  }

  __device__ void enter(int64_t batch, int64_t first) {
    batch_ = batch;
    first_ = first;
    sequence_ = sequence_of(call_.kv, call_.news, batch);
    chunks_ = chunks_of(sequence_, call_.window);
    count_ = count_of(sequence_);
  }

  // The units of the whole batch; enters the row of it that has unit number `wanted`.
  __device__ int64_t add_up(int64_t (&sums)[kDecodeWarps], int64_t wanted) {
    int64_t before = 0;
    for (int64_t begin = 0; begin < call_.news.batches; begin += kDecodeThreads) {
      const int64_t mine = begin + threadIdx.x;
      int64_t count = 0;
      if (mine < call_.news.batches) count = count_of(sequence_of(call_.kv, call_.news, mine));
      int64_t sum = count;  // of this warp, up to this lane
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int64_t other = __shfl_up_sync(0xffffffff, sum, distance);
        if (lane >= distance) sum += other;
      }
      __syncthreads();
      if (lane == 31) sums[warp] = sum;
      __syncthreads();
      if (wanted >= 0) {
        int64_t start = before + sum - count;
        for (int i = 0; i < warp; ++i) start += sums[i];
        const bool here = count > 0 && start <= wanted && wanted < start + count;
        if (__syncthreads_or(here)) {
          if (here) {
            sums[0] = mine;
            sums[1] = start;
          }
          __syncthreads();
          enter(sums[0], sums[1]);
          return 0;
        }
      }
      for (int i = 0; i < kDecodeWarps; ++i) before += sums[i];
    }
    return before;
  }

  const DecodeAttention& call_;
  int64_t parts_;
  int64_t next_ = 0, end_ = 0;
  int64_t batch_ = -1, first_ = 0, count_ = 0;  // of the row of the batch that it is in
  Sequence sequence_ = {};
  Chunks chunks_ = {};
};

// What a score becomes before the softmax: -inf for a key that is not seen.
struct Scoring {
  float scale, soft_cap, slope;
  int position, begin, end;  // of the query, of the keys that it sees

  Scoring() = default;
  __device__ Scoring(const DecodeAttention& call, int64_t head, int64_t at)
      : scale(call.scale),
        soft_cap(call.soft_cap),
        slope(call.alibi_slopes == nullptr ? 0.0f : call.alibi_slopes[head]),
        position(int(at)) {
    const Seen seen = seen_at(at, call.window);
    begin = int(seen.begin);
    end = int(seen.end);
  }

  __device__ bool sees(int key) const { return key >= begin && key < end; }

  __device__ float operator()(float product, float key_scale, int key) const {
    Floats<1> score(product * scale * key_scale);
    if (soft_cap > 0) score = capped(score, soft_cap);
    if (slope != 0) score = biased(score, Floats<1>(float(position - key)), slope);
    return sees(key) ? score.lanes[0] : -INFINITY;
  }
};

__device__ inline float shift_of_largest(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

__device__ inline float larger(float a, float b) { return a < b ? b : a; }  // a if b is NaN

}  // namespace cuda
}  // namespace dsx
