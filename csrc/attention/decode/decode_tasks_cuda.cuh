// Which tasks the blocks of decode_attention have, and where they leave what they have found.
#pragma once

#include <algorithm>

#include "common/cuda/vector_io.cuh"
#include "attention/decode/decode.h"

namespace dsx {

#include "common/softmax_math.inl"

namespace cuda {

constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps;

// a / b of numbers below 2^32, in a fifth of the instructions that 64 bits take.
__device__ inline int64_t quotient(int64_t a, int64_t b) { return uint32_t(a) / uint32_t(b); }

// What is put together in the end, of a row in some chunks: its floats, then `sum`, `largest`, and
// how many chunks they are of.
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

__device__ inline float shift_of_largest(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

__device__ inline float larger(float a, float b) { return a < b ? b : a; }  // a if b is NaN

// The largest score of a row among some keys, and the sum of e^(score - that).
struct Powers {
  float largest, sum;

  // What both are multiplied by when they are put together.
  struct Factors {
    float mine, others;
    __device__ float of(float a, float b) const { return __fmaf_rn(b, others, __fmul_rn(a, mine)); }
  };
  // Takes in those of later keys.
  __device__ Factors add(const Powers& others) {
    const float both = larger(largest, others.largest), shift = shift_of_largest(both);
    const Factors factors = {fast_exp_of_negative(largest - shift),
                             fast_exp_of_negative(others.largest - shift)};
    sum = factors.of(sum, others.sum);
    largest = both;
    return factors;
  }
  __device__ void store(float* place, int chunks) const {
    *reinterpret_cast<float4*>(place) = make_float4(sum, largest, __int_as_float(chunks), 0);
  }
  // Returns how many chunks they are of.
  __device__ int load(const float* place) {
    const float4 read = __ldcg(reinterpret_cast<const float4*>(place));
    sum = read.x, largest = read.y;
    return __float_as_int(read.z);
  }
};

// Where a row of the results is: of a head of keys, its rows are those of the first token, then of
// the next one.
struct ResultRow {
  int64_t index, token, head;  // index counts rows of [batches, tokens, heads]

  __device__ ResultRow(const DecodeAttention& call, int64_t batch, int64_t kv_head, int64_t row)
      : token(quotient(row, call.group)), head(kv_head * call.group + row - token * call.group) {
    index = (batch * call.news.tokens + token) * call.q.heads + head;
  }

  __device__ float sink(const DecodeAttention& call) const {
    return call.sinks == nullptr ? -INFINITY : call.sinks[head];
  }

  // The element that a thread's value number k is of. Each of the threads of a row, kStep of them,
  // has kRun side by side, then as many kStep * kRun further; of a width that is a multiple of
  // those.
  template <int kStep, int kRun>
  __device__ static int element(int thread, int k) {
    return (k / kRun * kStep + thread) * kRun + k % kRun;
  }
  // A thread writes its elements, T being q's type.
  template <class T, int kStep, int kRun, int kCount>
  __device__ void put(const DecodeAttention& call, int thread, const float (&values)[kCount],
                      float lse) const {
    struct alignas(kRun * sizeof(T)) Run {
      T elements[kRun];
    };
    const int64_t width = call.kv.width;
    T* const out = static_cast<T*>(call.out) + index * width;
#pragma unroll
    for (int k = 0; k < kCount; k += kRun) {
      Run run;
#pragma unroll
      for (int i = 0; i < kRun; ++i) run.elements[i] = narrow<T>(values[k + i]);
      const int first = element<kStep, kRun>(thread, k);
      if (first < width) *reinterpret_cast<Run*>(out + first) = run;
    }
    if (thread == 0) call.lse[index] = lse;
  }
  // The same of a row that sees nothing; true if it is one.
  template <class T, int kStep, int kRun, int kCount>
  __device__ bool put_none(const DecodeAttention& call, int thread, bool wrong,
                           int64_t count) const {
    if (!wrong && token < count) return false;
    float values[kCount];
#pragma unroll
    for (float& value : values) value = wrong ? NAN : 0.0f;
    put<T, kStep, kRun>(call, thread, values, wrong ? NAN : -INFINITY);
    return true;
  }
};

// Some elements of a row, chunk by chunk.
template <int kCount>
struct ElementsOfRow {
  Powers powers;
  float values[kCount];

  __device__ void add(const Powers& others, const float (&theirs)[kCount]) {
    const Powers::Factors factors = powers.add(others);
#pragma unroll
    for (int k = 0; k < kCount; ++k) values[k] = factors.of(values[k], theirs[k]);
  }
  // With all chunks there: the sink, if the call has any, and the results.
  template <class T, int kStep, int kRun>
  __device__ void put(const DecodeAttention& call, const ResultRow& row, int thread, float sink) {
    if (call.sinks != nullptr) add({sink, sink == -INFINITY ? 0.0f : 1.0f}, {});
    const float inverse = powers.sum == 0.0f ? 0.0f : 1.0f / powers.sum;
#pragma unroll
    for (float& value : values) value *= inverse;
    const float lse = ::logf(powers.sum) + shift_of_largest(powers.largest);
    row.put<T, kStep, kRun>(call, thread, values, lse);
  }
};

// Of a row of the batch, through the L2 cache: what is found may be of any time.
__device__ inline Sequence sequence_ahead(const DecodeAttention& call, int64_t batch) {
  const auto read = [](const int32_t* place) { return int64_t(__ldcg(place)); };
  return sequence_of(call.kv, call.news, batch, read);
}
// Again, where it is known of which slot it was: all is read at the same time.
__device__ inline Sequence sequence_again(const DecodeAttention& call, int64_t batch,
                                          int64_t slot) {
  const bool there = slot >= 0 && slot < call.kv.slots;
  const int32_t* const known = call.kv.lengths + (there ? slot : 0);
  const int64_t length = there ? int64_t(__ldcg(known)) : 0;
  return sequence_of(call.kv, call.news, batch, [&](const int32_t* place) {
    return there && place == known ? length : int64_t(__ldcg(place));
  });
}

// A task: a chunk of a row of the batch, and a head of keys.
struct Task {
  int slot, length, count;       // as Sequence says
  int seen_begin, seen_by_last;  // the first key that the first token sees; that the last one sees
  int batch, head;
  int chunk, index;  // index counts from the first chunk that is looked at
  bool there;        // else the block has no more

  __device__ int position(int64_t token) const { return length - count + int(token); }
  // Whether this and the next one, if there is one, are of the same rows.
  __device__ bool goes_on_in(const Task& next) const {
    return next.there && next.batch == batch && next.head == head;
  }
};

// The tasks of a block, one by one: for each row of the batch, its heads, for each its chunks. The
// host does not know how many there are. A whole warp has one, and calls it.
class Tasks {
 public:
  // The tasks of this block. Reads through the L2 cache: what it finds may be of any time.
  __device__ explicit Tasks(const DecodeAttention& call) : call_(&call) {
    read_batches(0);
    const int heads = int(call.kv.heads), lane = threadIdx.x % 32;
    int total = chunks_;
    for (int batch = lane + 32; batch < call.news.batches; batch += 32) {
      total += int(count_of(sequence_ahead(*call_, batch)));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(0xffffffff, total, distance);
    }
    total *= heads;
    const int blocks = int(gridDim.x), block = int(blockIdx.x);
    const int each = total / blocks, more = total % blocks;
    const int first = each * block + ::min(block, more);
    left_ = each + (block < more);
    if (left_ == 0) return;
    for (int before = 0;;) {
      const int mine = chunks_ * heads;
      int end = mine;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffff, end, distance);
        if (lane >= distance) end += other;
      }
      end += before;
      const unsigned here = __ballot_sync(0xffffffff, end - mine <= first && first < end);
      if (here != 0) {
        const int from = __ffs(int(here)) - 1;
        enter(base_ + from);
        const int number = first - __shfl_sync(0xffffffff, end - mine, from);
        next_.head = number / all_;
        next_.index = number % all_;
        return;
      }
      before = __shfl_sync(0xffffffff, end, 31);
      if (!read_batches(base_ + 32)) return;
    }
  }

  // Whether it would find the same now; false if that is not easily said.
  __device__ bool are_still_so() const {
    if (call_->news.batches > 32) return false;
    const int64_t batch = threadIdx.x % 32;
    Sequence sequence = {};
    if (batch < call_->news.batches) sequence = sequence_again(*call_, batch, slot_);
    return __all_sync(0xffffffff, sequence.slot == slot_ && sequence.length == length_ &&
                                      sequence.count == count_);
  }

  __device__ Task next() {
    next_.there = left_ > 0;
    if (!next_.there) return next_;
    --left_;
    if (next_.index == all_) next_.index = 0, ++next_.head;
    if (next_.head == call_->kv.heads) {
      next_.head = 0;
      do {
        if (next_.batch + 1 == base_ + 32 && !read_batches(base_ + 32)) return no_more();
        enter(next_.batch + 1);
      } while (all_ == 0);
    }
    next_.chunk = first_chunk_ + next_.index++;
    Task task = next_;
    --task.index;
    return task;
  }

 private:
  __device__ int64_t count_of(const Sequence& sequence) const {
    const Chunks chunks = chunks_of(sequence, call_->window);
    return chunks.end - chunks.first;
  }

  // Reads 32 rows of the batch, one in each lane; false if there are none.
  __device__ bool read_batches(int base) {
    base_ = base;
    const int64_t batch = base + threadIdx.x % 32;
    Sequence sequence = {};
    if (batch < call_->news.batches) sequence = sequence_ahead(*call_, batch);
    slot_ = int(sequence.slot), length_ = int(sequence.length), count_ = int(sequence.count);
    const Chunks chunks = chunks_of(sequence, call_->window);
    first_ = int(chunks.first), chunks_ = int(chunks.end - chunks.first);
    return base < call_->news.batches;
  }

  __device__ void enter(int batch) {
    const auto of_batch = [&](int value) { return __shfl_sync(0xffffffff, value, batch - base_); };
    first_chunk_ = of_batch(first_);
    all_ = of_batch(chunks_);
    next_.batch = batch;
    next_.slot = of_batch(slot_);
    next_.length = of_batch(length_);
    next_.count = of_batch(count_);
    next_.seen_begin = int(seen_at(next_.position(0), call_->window).begin);
    next_.seen_by_last = int(seen_at(next_.length - 1, call_->window).begin);
  }

  __device__ Task no_more() {
    left_ = 0;
    next_.there = false;
    return next_;
  }

  const DecodeAttention* call_;
  int base_, slot_, length_, count_, first_, chunks_;  // of row base_ + lane of the batch
  int left_;                                           // tasks
  int first_chunk_, all_;  // chunks of the row of the batch that next_ is in
  Task next_ = {};
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

}  // namespace cuda
}  // namespace dsx
