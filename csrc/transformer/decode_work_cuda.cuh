// How the blocks of decode_attention share its work, and where they leave what they have found.
#pragma once

#include <algorithm>

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
        chunks(most_chunks(call)),
        rows(call.rows()),
        floats(partial_floats(call.kv.width)) {}

  // Index counts from the first chunk that the new tokens of a slot look at.
  __device__ float* at(int64_t batch, int64_t heads, int64_t head, int64_t index,
                       int64_t row) const {
    return data + (((batch * heads + head) * chunks + index) * rows + row) * floats;
  }

 private:
  // That the new tokens of a slot can look at, wherever in it they are.
  static int64_t most_chunks(const DecodeAttention& call) {
    const int64_t all = (call.kv.pages_of_slot + kChunkPages - 1) / kChunkPages;
    if (call.window == 0 || call.window / kChunkTokens >= all) return all;
    const int64_t keys = call.window + call.news.tokens - 1;
    return std::min(all, (keys + kChunkTokens - 2) / kChunkTokens + 1);
  }
};

// A unit of work: for each row of the batch, its heads, for each its chunks, for each its parts,
// which are some rows each.
struct Unit {
  int slot, length, count;       // as Sequence says
  int seen_begin, seen_by_last;  // the first key that the first token sees; that the last one sees
  int batch, head, part;
  int chunk, index;  // index counts from the first chunk that is looked at
  bool there;        // else the block has no more
  bool same_rows;    // as those of the unit before

  __device__ int position(int64_t token) const { return length - count + int(token); }
};

// The units of a block, in shared memory. The host does not know how many there are.
struct Units {
  int left;                 // that have not been found
  int first_chunk, chunks;  // of the row of the batch that the next one is in
  Unit next;                // but for its chunk
  Unit units[3];            // this one, the next, and the one after that, in turn

  __device__ const Unit& at(int i) const { return units[i % 3]; }

  // Finds the share of this block, and units 0 and 1 of it: every thread calls it.
  __device__ void begin(const DecodeAttention& call, int parts) {
    if (threadIdx.x < 32) {
      find_share(call, parts);
      __syncwarp();
      if (threadIdx.x == 0) {
        find(call, parts, 0);
        units[0].same_rows = false;
        find(call, parts, 1);
      }
    }
    __syncthreads();
  }

  // Finds unit number i, the one after the last one that was found: one thread calls it.
  __device__ void find(const DecodeAttention& call, int parts, int i) {
    Unit& unit = units[i % 3];
    unit.there = left > 0;
    if (!unit.there) return;
    --left;
    if (next.index == chunks) next.index = 0, ++next.head;
    if (next.head == call.kv.heads) {
      next.head = 0;
      do enter(call, next.batch + 1);
      while (chunks == 0);
    }
    unit = next;
    unit.chunk = first_chunk + next.index;
    unit.there = true;
    unit.same_rows = parts == 1 && next.index > 0;
    if (++next.part == parts) next.part = 0, ++next.index;
  }

 private:
  __device__ static int units_of(const DecodeAttention& call, int parts, int64_t batch) {
    if (batch >= call.news.batches) return 0;
    const Chunks chunks = chunks_of(sequence_of(call.kv, call.news, batch), call.window);
    return int((chunks.end - chunks.first) * call.kv.heads) * parts;
  }

  __device__ void enter(const DecodeAttention& call, int to) {
    const Sequence sequence = sequence_of(call.kv, call.news, to);
    const Chunks all = chunks_of(sequence, call.window);
    first_chunk = int(all.first);
    chunks = int(all.end - all.first);
    next.batch = to;
    next.slot = int(sequence.slot);
    next.length = int(sequence.length);
    next.count = int(sequence.count);
    next.seen_begin = int(seen_at(sequence.position(0), call.window).begin);
    next.seen_by_last = int(seen_at(sequence.length - 1, call.window).begin);
  }

  // Blocks share the units of the whole batch; one warp calls it.
  __device__ void find_share(const DecodeAttention& call, int parts) {
    const int lane = threadIdx.x;
    int total = 0;
    for (int64_t row = lane; row < call.news.batches; row += 32) {
      total += units_of(call, parts, row);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(0xffffffff, total, distance);
    }
    const int blocks = int(gridDim.x), block = int(blockIdx.x);
    const int each = total / blocks, more = total % blocks;
    const int first = each * block + ::min(block, more);
    if (lane == 0) left = each + (block < more);
    if (each + (block < more) == 0) return;
    int end = 0;
    for (int64_t begin = 0;; begin += 32) {
      const int mine = units_of(call, parts, begin + lane), before = end;
      end = mine;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffff, end, distance);
        if (lane >= distance) end += other;
      }
      end += before;
      const bool here = end - mine <= first && first < end;
      if (here) {
        enter(call, int(begin) + lane);
        const int number = first - (end - mine), of_parts = number / parts;
        next.part = number % parts;
        next.head = of_parts / chunks;
        next.index = of_parts % chunks;
      }
      if (__any_sync(0xffffffff, here)) return;
      end = __shfl_sync(0xffffffff, end, 31);
    }
  }
};

// What scores of a row become before the softmax: -inf for a key that is not seen.
struct Scoring {
  float slope;
  int begin, end;  // of the keys that the row sees; the last one is itself

  __device__ void read(const DecodeAttention& call, int64_t head, int64_t position) {
    slope = call.alibi_slopes == nullptr ? 0.0f : call.alibi_slopes[head];
    const Seen seen = seen_at(position, call.window);
    begin = int(seen.begin);
    end = int(seen.end);
  }

  __device__ bool sees(int key) const { return key >= begin && key < end; }

  __device__ float score(const DecodeAttention& call, float product, int key) const {
    Floats<1> score(product * call.scale);
    if (call.soft_cap > 0) score = capped(score, call.soft_cap);
    if (slope != 0) score = biased(score, Floats<1>(float(end - 1 - key)), slope);
    return sees(key) ? score.lanes[0] : -INFINITY;
  }
};

__device__ inline float shift_of_largest(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

__device__ inline float larger(float a, float b) { return a < b ? b : a; }  // a if b is NaN

}  // namespace cuda
}  // namespace dsx
