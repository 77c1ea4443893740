// How the blocks of prefill_attention share its work, and what its kernels do alike: which rows a
// block has, what a score becomes, and how a row ends.
#pragma once

#include "common/cuda/vector_io.cuh"
#include "transformer/prefill_attention.h"

namespace dsx {

#include "transformer/softmax_math.inl"

namespace cuda {

constexpr float kLog2OfE = 1.44269504f;

// Some rows of a head of keys of one slot. Row t group + g is head g of new token t.
struct StripOfRows {
  Sequence sequence;
  int64_t batch, head, first_row;
  int group, tokens, q_heads;

  // Of the rows of a block. The last strips, which see most, come first.
  __device__ StripOfRows(const PrefillAttention& call, int64_t block, int64_t rows_of_block)
      : group(int(call.group)), tokens(int(call.news.tokens)), q_heads(int(call.q.heads)) {
    const int64_t strips = (call.rows() + rows_of_block - 1) / rows_of_block;
    first_row = (strips - 1 - block % strips) * rows_of_block;
    head = block / strips % call.kv.heads;
    batch = block / strips / call.kv.heads;
    sequence = sequence_of(call.kv, call.news, batch);
  }

  // Rows that there are, of the whole slot.
  __device__ int64_t rows() const { return sequence.count * group; }
  __device__ int token_of(int64_t row) const { return int(uint32_t(row) / uint32_t(group)); }
  __device__ int64_t position_of(int64_t row) const { return sequence.position(token_of(row)); }
  __device__ int head_of(int64_t row) const {
    return int(head) * group + int(row) - token_of(row) * group;
  }
  // Of its result.
  __device__ int64_t index_of(int64_t row) const {
    return (batch * tokens + token_of(row)) * q_heads + head_of(row);
  }
};

// Whether the table lacks a page that a new token of the slot looks at; all threads call it.
__device__ inline bool lacks_pages(const PrefillAttention& call, const Sequence& sequence) {
  if (sequence.count == 0) return false;  // of the whole block
  bool lacks = false;
  const int64_t begin = seen_at(sequence.position(0), call.window).begin / kPageTokens;
  const int64_t end = (sequence.length + kPageTokens - 1) / kPageTokens;
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    lacks |= call.kv.page_of(sequence.slot, i) < 0;
  }
  return __syncthreads_or(lacks);
}

// Writes the results of rows of the block that are not there; or, if the slot is not possible, NaN
// for all of them. All threads call it.
__device__ inline void store_the_rest(const PrefillAttention& call, const StripOfRows& strip,
                                      int64_t rows_of_block, bool wrong) {
  const int64_t end = ::min(strip.first_row + rows_of_block, int64_t(strip.tokens) * strip.group);
  const int64_t first = wrong ? strip.first_row : ::max(strip.first_row, strip.rows());
  const int64_t width = call.kv.width;
  const auto out = Pointer<Any>::to(call.out, call.q.dtype);
  for (int64_t i = threadIdx.x; i < (end - first) * width; i += blockDim.x) {
    const int64_t index = strip.index_of(first + i / width);
    store<Access::single>(out + (index * width + i % width), Floats<1>(wrong ? NAN : 0.0f), 1);
    if (i % width == 0) call.lse[index] = wrong ? NAN : -INFINITY;
  }
}

// The formula `capped` in 8 instructions, as accurate.
__device__ inline float quickly_capped(float score, float cap) {
  const float decay = fast_exp2(::fabsf(score) * (-2.0f * kLog2OfE / cap));
  return ::copysignf((1.0f - decay) * fast_reciprocal(1.0f + decay) * cap, score);
}

// Which keys a row sees, and what its scores become.
struct RowScoring {
  int begin, position;
  float slope;

  RowScoring() = default;
  __device__ RowScoring(const PrefillAttention& call, int64_t head, int64_t at)
      : begin(int(seen_at(at, call.window).begin)),
        position(int(at)),
        slope(call.alibi_slopes == nullptr ? 0.0f : call.alibi_slopes[head]) {}

  __device__ bool sees(int key) const { return key >= begin && key <= position; }

  // Of a key that it sees.
  __device__ float score(const PrefillAttention& call, float product, int key) const {
    Floats<1> score(product * call.scale);
    if (call.soft_cap > 0) score = Floats<1>(quickly_capped(score.lanes[0], call.soft_cap));
    if (call.alibi_slopes == nullptr) return score.lanes[0];
    return biased(score, Floats<1>(float(position - key)), slope).lanes[0];
  }
};

__device__ inline float shift_of_largest(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

// The end of a row with this largest score, and the sum of e^(score - largest): what the sum of
// values is to be multiplied by.
struct EndOfRow {
  float factor, lse;

  __device__ EndOfRow(const PrefillAttention& call, int64_t head, float largest, float sum) {
    const float sink = call.sinks == nullptr ? -INFINITY : call.sinks[head];
    const float shift = shift_of_largest(::fmaxf(largest, sink));
    const float share = ::expf(largest - shift);
    const float total = __fmaf_rn(sum, share, ::expf(sink - shift));
    factor = total == 0.0f ? 0.0f : share / total;
    lse = ::logf(total) + shift;
  }
};

}  // namespace cuda
}  // namespace dsx
