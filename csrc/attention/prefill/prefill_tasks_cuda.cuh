// Which tasks the blocks of prefill_attention have, and what its kernels do alike: which rows a
// block has, what a score becomes, and how a row ends.
#pragma once

#include "common/cuda/vector_io.cuh"
#include "attention/prefill/prefill.h"

namespace dsx {

#include "common/softmax_math.inl"

namespace cuda {

constexpr float kLog2OfE = 1.44269504f;

// Some rows of a head of keys of one slot. Row t group + g is head g of new token t. The host has
// seen to it that rows can be counted by int.
struct StripOfRows {
  bool wrong;               // the slot is not possible: it has no rows
  int slot, count, length;  // what is new, and with what there was
  int batch, head, first_row, group;

  // Of the rows of a block. The last strips, which see most, come first.
  __device__ StripOfRows(const PrefillAttention& call, unsigned block, int rows_of_block)
      : group(int(call.group)) {
    const unsigned strips = (unsigned(call.rows()) + rows_of_block - 1) / rows_of_block;
    const unsigned above = block / strips, heads = unsigned(call.kv.heads);
    first_row = int(strips - 1 - (block - above * strips)) * rows_of_block;
    batch = int(above / heads);
    head = int(above - batch * heads);
    const Sequence sequence = sequence_of(call.kv, call.news, batch);
    wrong = sequence.wrong;
    slot = int(sequence.slot);
    count = int(sequence.count);
    length = int(sequence.length);
  }

  // Rows that there are, of the whole slot.
  __device__ int rows() const { return count * group; }
  __device__ int token_of(int row) const { return int(unsigned(row) / unsigned(group)); }
  __device__ int position_of(int row) const { return length - count + token_of(row); }
  __device__ int head_of(int row) const { return head * group + row - token_of(row) * group; }
  // Of its result.
  __device__ int64_t index_of(const PrefillAttention& call, int row) const {
    return (batch * call.news.tokens + token_of(row)) * call.q.heads + head_of(row);
  }
};

// Whether the table lacks a page that a new token of the slot looks at; all threads call it.
__device__ inline bool lacks_pages(const PrefillAttention& call, const StripOfRows& strip) {
  if (strip.count == 0) return false;  // of the whole block
  bool lacks = false;
  const int begin = int(seen_at(strip.position_of(0), call.window).begin) / kPageTokens;
  const int end = ceil_div(strip.length, kPageTokens);
  for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
    lacks |= call.kv.page_of(strip.slot, i) < 0;
  }
  return __syncthreads_or(lacks);
}

// Writes the results of rows of the block that are not there; or, if the slot is not possible, NaN
// for all of them. So many threads call it, each with its number.
__device__ inline void store_the_rest(const PrefillAttention& call, const StripOfRows& strip,
                                      int rows_of_block, bool wrong, int thread, int threads) {
  const int end = ::min(strip.first_row + rows_of_block, int(call.rows()));
  const int first = wrong ? strip.first_row : ::max(strip.first_row, strip.rows());
  const int width = int(call.kv.width);
  const auto out = Pointer<Any>::to(call.out, call.q.dtype);
  for (int i = thread; i < (end - first) * width; i += threads) {
    const int64_t index = strip.index_of(call, first + i / width);
    store<Access::single>(out + (index * width + i % width), Floats<1>(wrong ? NAN : 0.0f), 1);
    if (i % width == 0) call.lse[index] = wrong ? NAN : -INFINITY;
  }
}
__device__ inline void store_the_rest(const PrefillAttention& call, const StripOfRows& strip,
                                      int rows_of_block, bool wrong) {  // all threads of the block
  store_the_rest(call, strip, rows_of_block, wrong, threadIdx.x, blockDim.x);
}

__device__ inline float capped(float score, float cap) {
  return dsx::capped(Floats<1>(score), cap).lanes[0];
}

// Which keys a row sees, and what its scores become.
struct RowScoring {
  int begin, position;
  float slope;

  RowScoring() = default;
  __device__ RowScoring(const PrefillAttention& call, int head, int at)
      : begin(int(seen_at(at, call.window).begin)),
        position(at),
        slope(call.alibi_slopes == nullptr ? 0.0f : call.alibi_slopes[head]) {}

  __device__ bool sees(int key) const { return key >= begin && key <= position; }

  __device__ float biased(float score, int key) const {
    return dsx::biased(Floats<1>(score), Floats<1>(float(position - key)), slope).lanes[0];
  }

  // Of a key that it sees.
  __device__ float score(const PrefillAttention& call, float product, int key) const {
    float score = product * call.scale;
    if (call.soft_cap > 0) score = capped(score, call.soft_cap);
    return call.alibi_slopes == nullptr ? score : biased(score, key);
  }
};

__device__ inline float shift_of_largest(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

// The end of a row with this largest score, and the sum of e^(score - largest): what the sum of
// values is to be multiplied by.
struct EndOfRow {
  float factor, lse;

  __device__ EndOfRow(const PrefillAttention& call, int head, float largest, float sum) {
    const float sink = call.sinks == nullptr ? -INFINITY : call.sinks[head];
    const float shift = shift_of_largest(::fmaxf(largest, sink));
    const float rescale = ::expf(largest - shift);
    const float total = __fmaf_rn(sum, rescale, ::expf(sink - shift));
    factor = total == 0.0f ? 0.0f : rescale / total;
    lse = ::logf(total) + shift;
  }
};

}  // namespace cuda
}  // namespace dsx
