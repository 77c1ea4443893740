// decode_attention on CUDA: chooses a kernel for the chunks, and puts together what they find.
#include "attention/decode/decode.h"

#include <algorithm>

#include "common/cuda/chain.cuh"
#include "common/dispatch.h"
#include "attention/decode/decode_any_cuda.cuh"
#include "attention/decode/decode_mma_cuda.cuh"

namespace dsx {
namespace {

using cuda::Device;
using cuda::kDecodeThreads;
using cuda::Partials;
using cuda::Powers;

constexpr const char* kOp = "decode_attention";

constexpr int kAtATime = 16;  // chunks

// A block has a row, each thread an element of it, and goes through its chunks in their order.
template <class T>
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
  const cuda::ResultRow result(call, batch, kv_head, row);
  const float sink = result.sink(call);
  const Sequence sequence = sequence_of(call.kv, call.news, batch);
  cuda::wait_for_previous();
  if (result.put_none<T, 1, 1, 1>(call, threadIdx.x, sequence.wrong, sequence.count)) return;
  const Chunks all = chunks_of(sequence, call.window);
  cuda::ElementsOfRow<1> mine;
  const int count = int(all.end - all.first), done = mine.powers.load(partial + padded);
  mine.values[0] = __ldcg(partial + element);
  for (int i = done; i < count; i += kAtATime) {
    Powers others[kAtATime];
    float values[kAtATime][1];
#pragma unroll
    for (int k = 0; k < kAtATime; ++k) {
      const float* const other = partial + ::min(i + k, count - 1) * step;
      others[k].load(other + padded);
      values[k][0] = __ldcg(other + element);
    }
#pragma unroll
    for (int k = 0; k < kAtATime; ++k) {
      if (i + k < count) mine.add(others[k], values[k]);
    }
  }
  mine.put<T, 1, 1>(call, result, threadIdx.x, sink);
}

int64_t tasks_of(const DecodeAttention& call, const Partials& partials) {
  return call.news.batches * call.kv.heads * partials.chunks;
}

// As many blocks as the device runs at the same time divide the tasks.
template <class... Parameters, class... More>
void launch(void (*kernel)(Parameters...), const Device& device, int threads, int shared_bytes,
            const DecodeAttention& call, const Partials& partials, cudaStream_t stream,
            const More&... more) {
  const int64_t tasks = tasks_of(call, partials);
  if (tasks > INT32_MAX) {
    throw std::runtime_error(std::string(kOp) + ": the cache has " + std::to_string(tasks) +
                             " chunks of slots and heads, expected at most 2^31 - 1");
  }
  cuda::Launch made = {1, threads, shared_bytes, 1, cuda::can_chain(kernel, kOp)};
  cuda::allow_shared_memory(kernel, shared_bytes, kOp);
  int resident = 0;
  cuda::check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads,
                                                            size_t(shared_bytes)),
              kOp);
  made.blocks = unsigned(std::min<int64_t>(tasks, int64_t(device.processors) * resident));
  if (made.blocks == 0) return;
  cuda::launch_kernel(kernel, made, stream, kOp, call, partials, more...);
}

bool launch_mma(const Device& device, const DecodeAttention& call, const Partials& partials,
                cudaStream_t stream) {
  return cuda::with_mma<DSX_KV>(call, [&](auto q, auto width) {
    using Q = decltype(q);
    constexpr int kWidth = decltype(width)::value;
    const auto kernel = cuda::decode_mma_kernel<Q, DSX_KV, kWidth>;
    const bool much = tasks_of(call, partials) / device.processors >= cuda::kMuch;
    int stages =
        cuda::stages_in<DSX_KV, kWidth>(device, much, cuda::static_shared_bytes(kernel, kOp));
    // Of floats more that is on its way at a time comes no faster.
    if (!DSX_KV::kQuantized) stages = std::min(stages, cuda::kEnough);
    const auto tiles = cuda::tma_tiles_of<DSX_KV, kWidth>(call.kv, stages);
    launch(kernel, device, cuda::kPipelineThreads,
           cuda::mma_shared_bytes<DSX_KV, kWidth>(tiles.stages), call, partials, stream, tiles);
    return true;
  });
}

}  // namespace

int64_t decode_workspace_bytes(const DecodeAttention& call) {
  const Partials partials(call, nullptr);
  const int64_t rows = call.news.batches * call.kv.heads * partials.chunks * partials.rows;
  return std::max<int64_t>(1, rows * partials.floats * int64_t(sizeof(float)));
}

void decode_attention_cuda(const DecodeAttention& call, void* workspace, void* stream) {
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  if (decode_in_clusters_cuda(call, nullptr, stream)) return;
  const Device device(kOp);
  const Partials partials(call, workspace);
  const cudaStream_t queue = cudaStream_t(stream);
  if (!launch_mma(device, call, partials, queue)) {
    launch(cuda::decode_any_kernel<DSX_KV>, device, kDecodeThreads, 0, call, partials, queue);
  }
  const int64_t rows = call.news.batches * call.news.tokens * call.q.heads;
  const int threads = int(ceil_div(call.kv.width, 32) * 32);
  with_storage_type(call.q.dtype, [&](auto storage) {
    const auto kernel = merge_kernel<decltype(storage)>;
    // It reads lengths before it waits, as the kernel before it, if any, has waited for them.
    const bool chained = partials.chunks > 0 && cuda::can_chain(kernel, kOp);
    cuda::launch_kernel(kernel, {unsigned(rows), threads, 0, 1, chained}, queue, kOp, call,
                        partials);
  });
}

}  // namespace dsx
