// decode_attention on CUDA: chooses a kernel for the chunks, and puts together what they find.
#include "transformer/decode_attention.h"

#include <algorithm>

#include "common/cuda/chain.cuh"
#include "transformer/decode_any_cuda.cuh"
#include "transformer/decode_mma_cuda.cuh"

namespace dsx {
namespace {

using cuda::Device;
using cuda::kDecodeThreads;
using cuda::Partials;
using cuda::Powers;

constexpr const char* kOp = "decode_attention";

constexpr int kAtATime = 16;  // chunks

// A block has a row, each thread an element of it, and goes through its chunks in their order.
__global__ void __launch_bounds__(kLargestWidth)
    merge_kernel(const __grid_constant__ DecodeAttention call,
                 const __grid_constant__ Partials partials) {
  cuda::let_next_begin();
  const int64_t index = blockIdx.x, heads = call.q.heads, width = call.kv.width;
  const int64_t of_token = cuda::quotient(index, heads), head = index - of_token * heads;
  const int64_t batch = cuda::quotient(of_token, call.news.tokens);
  const int64_t token = of_token - batch * call.news.tokens;
  const int64_t kv_head = cuda::quotient(head, call.group);
  const int64_t row = token * call.group + head - kv_head * call.group;
  const int64_t padded = padded_width(width), step = partials.rows * partials.floats;
  const float* partial = partials.at(batch, call.kv.heads, kv_head, 0, row);
  const int64_t element = ::min(int64_t(threadIdx.x), width - 1);
  const float sink = call.sinks == nullptr ? -INFINITY : call.sinks[head];
  const Sequence sequence = sequence_of(call.kv, call.news, batch);
  const auto put = [&](float value, float lse) {
    const auto out = Pointer<Any>::to(call.out, call.q.dtype) + (index * width + element);
    if (threadIdx.x < width) cuda::store<cuda::Access::single>(out, cuda::Floats<1>(value), 1);
    if (threadIdx.x == 0) call.lse[index] = lse;
  };
  cuda::wait_for_previous();
  if (sequence.wrong) return put(NAN, NAN);
  if (token >= sequence.count) return put(0, -INFINITY);
  const Chunks all = chunks_of(sequence, call.window);
  Powers powers;
  const int count = int(all.end - all.first), done = powers.load(partial + padded);
  float value = __ldcg(partial + element);
  for (int i = done; i < count; i += kAtATime) {
    Powers others[kAtATime];
    float values[kAtATime];
#pragma unroll
    for (int k = 0; k < kAtATime; ++k) {
      const float* const other = partial + ::min(i + k, count - 1) * step;
      others[k].load(other + padded);
      values[k] = __ldcg(other + element);
    }
#pragma unroll
    for (int k = 0; k < kAtATime; ++k) {
      if (i + k < count) value = powers.add(others[k]).of(value, values[k]);
    }
  }
  if (call.sinks != nullptr)
    value = powers.add({sink, sink == -INFINITY ? 0.0f : 1.0f}).of(value, 0);
  const float inverse = powers.sum == 0.0f ? 0.0f : 1.0f / powers.sum;
  put(value * inverse, ::logf(powers.sum) + cuda::shift_of_largest(powers.largest));
}

int64_t units_of(const DecodeAttention& call, const Partials& partials) {
  return call.news.batches * call.kv.heads * partials.chunks;
}

// As many blocks as the device runs at the same time share the work.
template <class... Parameters, class... More>
void launch(void (*kernel)(Parameters...), const Device& device, int threads, int shared_bytes,
            const DecodeAttention& call, const Partials& partials, cudaStream_t stream,
            const More&... more) {
  const int64_t units = units_of(call, partials);
  if (units > INT32_MAX) {
    throw std::runtime_error(std::string(kOp) + ": the cache has " + std::to_string(units) +
                             " chunks of slots and heads, expected at most 2^31 - 1");
  }
  cuda::Launch made = {1, threads, shared_bytes, 1, cuda::can_chain(kernel, kOp)};
  cuda::allow_shared_memory(kernel, made, kOp);
  int resident = 0;
  cuda::check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads,
                                                            size_t(shared_bytes)),
              kOp);
  made.blocks = unsigned(std::min<int64_t>(units, int64_t(device.processors) * resident));
  if (made.blocks == 0) return;
  cuda::launch_kernel(kernel, made, stream, kOp, call, partials, more...);
}

// Whether all of keys, values and scales can be read 16 bytes at a time.
bool are_aligned(const PagedKv& kv) {
  const uint64_t bytes = DSX_KV::kQuantized ? 1 : uint64_t(bytes_of(kv.dtype));
  uint64_t all = uint64_t(kv.of_page | kv.of_head | kv.of_token | kv.width) * bytes;
  for (const void* data :
       {static_cast<const void*>(kv.keys), static_cast<const void*>(kv.values),
        static_cast<const void*>(kv.key_scales), static_cast<const void*>(kv.value_scales)}) {
    all |= reinterpret_cast<uintptr_t>(data);
  }
  return all % 16 == 0;
}

template <class Q>
void launch_mma(const Device& device, const DecodeAttention& call, const Partials& partials,
                cudaStream_t stream) {
  const auto with_width = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const auto boxes = cuda::boxes_of<DSX_KV, kWidth>(call.kv, device,
                                                      units_of(call, partials) / device.processors);
    launch(cuda::decode_mma_kernel<Q, DSX_KV, kWidth>, device, cuda::kRingThreads,
           cuda::mma_shared_bytes<DSX_KV, kWidth>(boxes.slots), call, partials, stream, boxes);
  };
  if (call.kv.width <= 64) {
    with_width(std::integral_constant<int, 64>{});
  } else if (call.kv.width <= 128) {
    with_width(std::integral_constant<int, 128>{});
  } else {
    with_width(std::integral_constant<int, 256>{});
  }
}

}  // namespace

int64_t decode_workspace_bytes(const DecodeAttention& call) {
  const Partials partials(call, nullptr);
  const int64_t rows = call.news.batches * call.kv.heads * partials.chunks * partials.rows;
  return std::max<int64_t>(1, rows * partials.floats * int64_t(sizeof(float)));
}

void decode_attention_cuda(const DecodeAttention& call, void* workspace, void* stream) {
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  const Device device(kOp);
  const Partials partials(call, workspace);
  const cudaStream_t queue = cudaStream_t(stream);
  const bool same = DSX_KV::kQuantized || call.q.dtype == call.kv.dtype;
  if (same && call.q.dtype == Dtype::bfloat16 && are_aligned(call.kv)) {
    launch_mma<BFloat16>(device, call, partials, queue);
  } else if (same && call.q.dtype == Dtype::float16 && are_aligned(call.kv)) {
    launch_mma<Half>(device, call, partials, queue);
  } else {
    launch(cuda::decode_any_kernel<DSX_KV>, device, kDecodeThreads, 0, call, partials, queue);
  }
  const int64_t rows = call.news.batches * call.news.tokens * call.q.heads;
  // It reads lengths before it waits, as the kernel before it has waited for them: if there is one.
  const bool chained = partials.chunks > 0 && cuda::can_chain(merge_kernel, kOp);
  const int threads = int(ceil_div(call.kv.width, 32) * 32);
  cuda::launch_kernel(merge_kernel, {unsigned(rows), threads, 0, 1, chained}, queue, kOp, call,
                      partials);
}

}  // namespace dsx
