// block_sparse_attention on CUDA for any dtypes and widths, in float32: a block of threads has 16
// tokens, its lanes, and others come into shared memory by 16 or 32. What has a weight of 0 has no
// part, whatever it is. It also does again what tensor cores leave: rows that are not finite.
#pragma once

#include "attention/sparse/block_sparse_tasks_cuda.cuh"

namespace dsx::cuda {

constexpr int kAnyThreads = 128, kAnyLanes = 16;
constexpr int kAnyOfRow = kAnyThreads / kAnyLanes;              // threads of a lane
constexpr int kAnyParts = int(kLargestHead) / (4 * kAnyOfRow);  // of four elements, of a thread
constexpr int kAnyMost = 2;                                     // units of 16 others at once
constexpr int kAnyPitch = 16 * kAnyMost + 1;                    // of products
constexpr int kAnyChunk = 32;                                   // strips that a block looks at

enum class Direction { forward, rows, columns };

// Shared memory: two arrays of lanes and of others, their products, shifts and deltas of others.
struct AnyMemory {
  int width, padded, pitch, most;

  AnyMemory(int width, int most)
      : width(width), padded((width + 3) / 4 * 4), pitch(padded + 4), most(most) {}

  int bytes() const {
    const int floats = 2 * 16 * (1 + most) * pitch + 2 * kAnyLanes * kAnyPitch + 2 * 16 * most;
    return floats * 4;
  }
  __device__ static float* begin() {
    extern __shared__ __align__(1024) char shared_bytes[];
    return reinterpret_cast<float*>(shared_bytes);
  }
  __device__ float* lanes(int which) const { return begin() + which * kAnyLanes * pitch; }
  __device__ float* others(int which) const { return lanes(2) + which * 16 * most * pitch; }
  __device__ float* products(int which) const { return others(2) + which * kAnyLanes * kAnyPitch; }
  __device__ float* numbers(int which) const { return products(2) + which * 16 * most; }
};

struct AnyStrip {
  int batch, head, first;
};

// Goes through the units of 16 tokens of a list that a strip sees, or that see it.
class AnyWalk {
 public:
  __device__ AnyWalk(const SparseTask& task, int head, int first, bool of_rows)
      : task_(task),
        list_(task.lists.of(head, first / task.tile)),
        bit_(first % task.tile / task.call.block),
        first_(first),
        of_rows_(of_rows) {}

  // Finds up to `most` of them; tells how many.
  __device__ int next(int (&tokens)[kAnyMost], int most) {
    int found = 0;
    for (; found < most && entry_ < list_.count; step()) {
      const uint32_t entry = list_.entries[entry_];
      if ((entry >> bit_ & 1) == 0) {
        unit_ = task_.call.block / 16 - 1;
        continue;
      }
      const int token = int(entry >> 8) * task_.call.block + unit_ * 16;
      if (token >= task_.call.tokens || is_hidden(token)) continue;
      tokens[found == 0 ? 0 : 1] = token;
      ++found;
    }
    return found;
  }

 private:
  __device__ void step() {
    if (++unit_ < task_.call.block / 16) return;
    unit_ = 0;
    ++entry_;
  }
  __device__ bool is_hidden(int token) const {
    if (!task_.call.causal) return false;
    return of_rows_ ? token >= first_ + kAnyLanes : token + 16 <= first_;
  }

  const SparseTask& task_;
  const TileList list_;
  const int bit_, first_;
  const bool of_rows_;
  int entry_ = 0, unit_ = 0;
};

// The elements of 16 tokens as floats; what is not there is 0.
__device__ inline void load_any(const SparseTask& task, const HeadTokens& from, int batch, int head,
                                int first, const AnyMemory& memory, float* to) {
  const int sub = threadIdx.x % kAnyOfRow, row = threadIdx.x / kAnyOfRow;
  const bool is_there = first + row < task.call.tokens;
  const Pointer<Any> source = from.at(batch, head, is_there ? first + row : 0);
  for (int i = sub; i < memory.padded; i += kAnyOfRow) {
    to[row * memory.pitch + i] = is_there && i < memory.width ? element_of(source, i) : 0;
  }
}

// Products of all lanes with `count` others.
__device__ inline void multiply_any(const AnyMemory& memory, const float* lanes,
                                    const float* others, int count, float* products) {
  const int lane = threadIdx.x / 16 * 2;
  const float* const first = lanes + lane * memory.pitch;
  for (int o = threadIdx.x % 16; o < count; o += 16) {
    const float* const other = others + o * memory.pitch;
    float sums[2] = {};
    for (int i = 0; i < memory.padded; i += 4) {
      const float4 a = *reinterpret_cast<const float4*>(first + i);
      const float4 b = *reinterpret_cast<const float4*>(first + memory.pitch + i);
      const float4 c = *reinterpret_cast<const float4*>(other + i);
      sums[0] = fmaf(a.w, c.w, fmaf(a.z, c.z, fmaf(a.y, c.y, fmaf(a.x, c.x, sums[0]))));
      sums[1] = fmaf(b.w, c.w, fmaf(b.z, c.z, fmaf(b.y, c.y, fmaf(b.x, c.x, sums[1]))));
    }
    products[lane * kAnyPitch + o] = sums[0];
    products[(lane + 1) * kAnyPitch + o] = sums[1];
  }
}

__device__ inline float add_any(float weight, float element, float sum) {
  return weight == 0 ? sum : fmaf(weight, element, sum);
}

// Adds others, each times its weight for the lane of this thread, to a thread's part of it.
__device__ inline void add_any(const AnyMemory& memory, const float* weights, const float* others,
                               int count, float (&sums)[kAnyParts][4]) {
  const int begin = threadIdx.x % kAnyOfRow * 4;
  for (int o = 0; o < count; ++o) {
    const float weight = weights[o];
    const float* const other = others + o * memory.pitch;
#pragma unroll
    for (int p = 0; p < kAnyParts; ++p) {
      const int i = begin + p * 4 * kAnyOfRow;
      if (i >= memory.padded) continue;
      const float4 elements = *reinterpret_cast<const float4*>(other + i);
      sums[p][0] = add_any(weight, elements.x, sums[p][0]);
      sums[p][1] = add_any(weight, elements.y, sums[p][1]);
      sums[p][2] = add_any(weight, elements.z, sums[p][2]);
      sums[p][3] = add_any(weight, elements.w, sums[p][3]);
    }
  }
}

__device__ inline void store_any(const HeadTokens& to, const AnyStrip& strip, int width,
                                 const float (&sums)[kAnyParts][4], float factor) {
  const int lane = threadIdx.x / kAnyOfRow, begin = threadIdx.x % kAnyOfRow * 4;
  const Pointer<Any> target = to.at(strip.batch, strip.head, strip.first + lane);
#pragma unroll
  for (int p = 0; p < kAnyParts; ++p) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = begin + p * 4 * kAnyOfRow + k;
      if (i >= width) continue;
      const float value = sums[p][k] * factor;
      if (to.dtype == Dtype::bfloat16) {
        static_cast<BFloat16*>(target.address)[i] = narrow<BFloat16>(value);
      } else if (to.dtype == Dtype::float16) {
        static_cast<Half*>(target.address)[i] = narrow<Half>(value);
      } else {
        static_cast<float*>(target.address)[i] = value;
      }
    }
  }
}

// The same sum, or the largest, in all threads of a lane.
__device__ inline float sum_of_lane(float value) {
  for (int distance = 1; distance < kAnyOfRow; distance *= 2) {
    value += __shfl_xor_sync(0xffffffff, value, distance);
  }
  return value;
}
__device__ inline float largest_of_lane(float value) {
  for (int distance = 1; distance < kAnyOfRow; distance *= 2) {
    value = ::fmaxf(value, __shfl_xor_sync(0xffffffff, value, distance));
  }
  return value;
}

// What a thread does for its row; `wanted` has a bit for each lane.
__device__ inline void attend_any(const SparseTask& task, const AnyMemory& memory,
                                  const AnyStrip& strip, uint32_t wanted) {
  const BlockSparse& call = task.call;
  const int lane = threadIdx.x / kAnyOfRow, row = strip.first + lane;
  const int kv_head = strip.head / int(call.group());
  float sums[kAnyParts][4] = {};
  float largest = -INFINITY, total = 0;
  AnyWalk walk(task, strip.head, strip.first, true);
  load_any(task, call.q, strip.batch, strip.head, strip.first, memory, memory.lanes(0));
  int tokens[kAnyMost];
  for (int units; (units = walk.next(tokens, memory.most)) > 0;) {
    const int count = units * 16;
    for (int u = 0; u < units; ++u) {
      const int place = u * 16 * memory.pitch, token = tokens[u == 0 ? 0 : 1];
      load_any(task, call.k, strip.batch, kv_head, token, memory, memory.others(0) + place);
      load_any(task, call.v, strip.batch, kv_head, token, memory, memory.others(1) + place);
    }
    __syncthreads();
    multiply_any(memory, memory.lanes(0), memory.others(0), count, memory.products(0));
    __syncthreads();
    float* const scores = memory.products(0) + lane * kAnyPitch;
    float most = largest;
    for (int o = threadIdx.x % kAnyOfRow; o < count; o += kAnyOfRow) {
      const int key = tokens[o < 16 ? 0 : 1] + o % 16;
      scores[o] = score_of(call, strip.batch, strip.head, row, key, scores[o], call.scale);
      most = ::fmaxf(most, scores[o]);
    }
    most = largest_of_lane(most);
    const float shift = zero_if_none(most), rescale = expf(largest - shift);
    largest = most;
    float sum = 0;
    for (int o = threadIdx.x % kAnyOfRow; o < count; o += kAnyOfRow) {
      scores[o] = expf(scores[o] - shift);
      sum += scores[o];
    }
    total = fmaf(total, rescale, sum_of_lane(sum));
    __syncwarp();
#pragma unroll
    for (int p = 0; p < kAnyParts; ++p) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[p][k] *= rescale;
    }
    add_any(memory, scores, memory.others(1), count, sums);
    __syncthreads();
  }
  if (row >= call.tokens || (wanted >> lane & 1) == 0) return;
  store_any(call.out, strip, int(call.width), sums, total == 0 ? 0.0f : 1.0f / total);
  if (threadIdx.x % kAnyOfRow != 0) return;
  call.lse[(int64_t(strip.batch) * call.heads + strip.head) * call.tokens + row] =
      total == 0 ? -INFINITY : zero_if_none(largest) + logf(total);
}

// From products of q and k to weights, and from those of the gradient of the result and v to the
// gradients of scores, of the lane of this thread; numbers are of its row, or of others.
template <bool kRows>
__device__ inline void weigh_any(const SparseTask& task, const AnyMemory& memory, int batch,
                                 int head, int token, const int (&tokens)[kAnyMost], int count,
                                 float shift, float delta) {
  const int lane = threadIdx.x / kAnyOfRow;
  float* const weights = memory.products(0) + lane * kAnyPitch;
  float* const grads = memory.products(1) + lane * kAnyPitch;
  for (int o = threadIdx.x % kAnyOfRow; o < count; o += kAnyOfRow) {
    const int other = tokens[o < 16 ? 0 : 1] + o % 16;
    const int row = kRows ? token : other, key = kRows ? other : token;
    const float score = score_of(task.call, batch, head, row, key, weights[o], task.call.scale);
    const float off = kRows ? shift : memory.numbers(0)[o];
    const float weight = score == -INFINITY ? 0.0f : expf(score - off);
    const float back = grads[o] - (kRows ? delta : memory.numbers(1)[o]);
    weights[o] = weight;
    grads[o] = weight == 0 ? 0.0f : weight * back;
  }
}

__device__ inline void backward_of_rows_any(const SparseTask& task, const AnyMemory& memory,
                                            const AnyStrip& strip, uint32_t wanted) {
  const BlockSparse& call = task.call;
  const int lane = threadIdx.x / kAnyOfRow, row = strip.first + lane;
  const int kv_head = strip.head / int(call.group());
  const int64_t heads = int64_t(strip.batch) * call.heads + strip.head;
  const int64_t number = heads * call.tokens + ::min(row, int(call.tokens) - 1);
  const float shift = call.lse[number], delta = task.numbers[number].delta;
  float sums[kAnyParts][4] = {};
  AnyWalk walk(task, strip.head, strip.first, true);
  load_any(task, call.q, strip.batch, strip.head, strip.first, memory, memory.lanes(0));
  load_any(task, task.grad_out, strip.batch, strip.head, strip.first, memory, memory.lanes(1));
  int tokens[kAnyMost];
  for (int units; (units = walk.next(tokens, memory.most)) > 0;) {
    const int count = units * 16;
    for (int u = 0; u < units; ++u) {
      const int place = u * 16 * memory.pitch, token = tokens[u == 0 ? 0 : 1];
      load_any(task, call.k, strip.batch, kv_head, token, memory, memory.others(0) + place);
      load_any(task, call.v, strip.batch, kv_head, token, memory, memory.others(1) + place);
    }
    __syncthreads();
    for (int i = 0; i < 2; ++i) {
      multiply_any(memory, memory.lanes(i), memory.others(i), count, memory.products(i));
    }
    __syncthreads();
    weigh_any<true>(task, memory, strip.batch, strip.head, row, tokens, count, shift, delta);
    __syncwarp();
    add_any(memory, memory.products(1) + lane * kAnyPitch, memory.others(0), count, sums);
    __syncthreads();
  }
  if (row >= call.tokens || (wanted >> lane & 1) == 0) return;
  store_any(task.grad_q, strip, int(call.width), sums, call.scale);
}

// Shifts and deltas of others.
__device__ inline void load_numbers_any(const SparseTask& task, const AnyMemory& memory, int batch,
                                        int head, const int (&tokens)[kAnyMost], int count) {
  const int o = threadIdx.x;
  if (o >= count) return;
  const int row = tokens[o < 16 ? 0 : 1] + o % 16;
  const bool is_there = row < task.call.tokens;
  const int64_t number = (int64_t(batch) * task.call.heads + head) * task.call.tokens + row;
  memory.numbers(0)[o] = is_there ? task.call.lse[number] : 0;
  memory.numbers(1)[o] = is_there ? task.numbers[number].delta : 0;
}

__device__ inline void backward_of_columns_any(const SparseTask& task, const AnyMemory& memory,
                                               const AnyStrip& strip, uint32_t wanted) {
  const BlockSparse& call = task.call;
  const int lane = threadIdx.x / kAnyOfRow, key = strip.first + lane, group = int(call.group());
  float of_k[kAnyParts][4] = {}, of_v[kAnyParts][4] = {};
  load_any(task, call.k, strip.batch, strip.head, strip.first, memory, memory.lanes(0));
  load_any(task, call.v, strip.batch, strip.head, strip.first, memory, memory.lanes(1));
  for (int head = strip.head * group; head < (strip.head + 1) * group; ++head) {
    AnyWalk walk(task, head, strip.first, false);
    int tokens[kAnyMost];
    for (int units; (units = walk.next(tokens, memory.most)) > 0;) {
      const int count = units * 16;
      for (int u = 0; u < units; ++u) {
        const int place = u * 16 * memory.pitch, token = tokens[u == 0 ? 0 : 1];
        load_any(task, call.q, strip.batch, head, token, memory, memory.others(0) + place);
        load_any(task, task.grad_out, strip.batch, head, token, memory, memory.others(1) + place);
      }
      load_numbers_any(task, memory, strip.batch, head, tokens, count);
      __syncthreads();
      for (int i = 0; i < 2; ++i) {
        multiply_any(memory, memory.lanes(i), memory.others(i), count, memory.products(i));
      }
      __syncthreads();
      weigh_any<false>(task, memory, strip.batch, head, key, tokens, count, 0, 0);
      __syncwarp();
      add_any(memory, memory.products(0) + lane * kAnyPitch, memory.others(1), count, of_v);
      add_any(memory, memory.products(1) + lane * kAnyPitch, memory.others(0), count, of_k);
      __syncthreads();
    }
  }
  if (key >= call.tokens || (wanted >> lane & 1) == 0) return;
  store_any(task.grad_k, strip, int(call.width), of_k, call.scale);
  store_any(task.grad_v, strip, int(call.width), of_v, 1);
}

// Shifts and deltas, a warp for each row.
constexpr int kNumberThreads = 256;

__global__ void __launch_bounds__(kNumberThreads)
    numbers_kernel(const __grid_constant__ SparseTask task, const float* grad_lse) {
  const BlockSparse& call = task.call;
  const int64_t row = int64_t(blockIdx.x) * (kNumberThreads / 32) + threadIdx.x / 32;
  if (row >= call.batches * call.heads * call.tokens) return;
  const int64_t head = row / call.tokens, token = row % call.tokens;
  const Pointer<Any> out = call.out.at(head / call.heads, head % call.heads, token);
  const Pointer<Any> grad = task.grad_out.at(head / call.heads, head % call.heads, token);
  float sum = 0;
  for (int i = threadIdx.x % 32; i < call.width; i += 32) {
    const float result = element_of(out, i);
    if (result != 0) sum += result * element_of(grad, i);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  if (threadIdx.x % 32 != 0) return;
  const float lse = call.lse[row];
  task.numbers[row] = {lse == -INFINITY ? INFINITY : lse * kLog2E,
                       grad_lse == nullptr ? sum : sum - grad_lse[row]};
}

// All strips; or those of which some are spoiled: then a block looks at kAnyChunk of them.
template <Direction kDirection>
__global__ void __launch_bounds__(kAnyThreads)
    any_kernel(const __grid_constant__ SparseTask task, const AnyMemory memory) {
  const BlockSparse& call = task.call;
  const int strips = int(ceil_div(call.tokens, int64_t(kAnyLanes)));
  const int heads = int(kDirection == Direction::columns ? call.kv_heads : call.heads);
  const auto run = [&](int64_t number, uint32_t wanted) {
    const int64_t head = number / strips;
    const AnyStrip strip{int(head / heads), int(head % heads), int(number % strips) * kAnyLanes};
    if constexpr (kDirection == Direction::forward) {
      attend_any(task, memory, strip, wanted);
    } else if constexpr (kDirection == Direction::rows) {
      backward_of_rows_any(task, memory, strip, wanted);
    } else {
      backward_of_columns_any(task, memory, strip, wanted);
    }
  };
  if (task.spoiled == nullptr) return run(blockIdx.x, 0xffff);
  const int64_t first = int64_t(blockIdx.x) * kAnyChunk, count = call.batches * heads * strips;
  const int64_t mine = first + threadIdx.x % 32;
  const uint32_t spoiled = mine < count ? task.spoiled[mine] : 0;
  for (unsigned left = __ballot_sync(0xffffffff, spoiled != 0); left != 0; left &= left - 1) {
    const int i = __ffs(left) - 1;
    __syncthreads();
    run(first + i, __shfl_sync(0xffffffff, spoiled, i));
  }
}

}  // namespace dsx::cuda
