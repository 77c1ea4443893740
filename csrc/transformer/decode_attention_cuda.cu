// decode_attention on CUDA: chooses a kernel for the chunks, and puts together what they find.
#include "transformer/decode_attention.h"

#include <algorithm>
#include <string>

#include "common/cuda/chain.cuh"
#include "common/cuda/check.h"
#include "transformer/decode_any_cuda.cuh"
#include "transformer/decode_mma_cuda.cuh"

namespace dsx {
namespace {

using cuda::kDecodeThreads;
using cuda::Partials;

constexpr const char* kOp = "decode_attention";

constexpr int kMergeThreads = 128, kAtATime = 16;

// A block has a row, and goes through its chunks in their order.
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ DecodeAttention call,
                 const __grid_constant__ Partials partials) {
  __shared__ float shares[kMergeThreads], sums[kMergeThreads];
  cuda::let_next_begin();
  const int64_t index = blockIdx.x, heads = call.q.heads, width = call.kv.width;
  const int64_t of_token = cuda::quotient(index, heads), head = index - of_token * heads;
  const int64_t batch = cuda::quotient(of_token, call.news.tokens);
  const int64_t token = of_token - batch * call.news.tokens;
  const int64_t kv_head = cuda::quotient(head, call.group);
  const int64_t row = token * call.group + head - kv_head * call.group;
  const int64_t padded = padded_width(width), step = partials.rows * partials.floats;
  const float* const first = partials.at(batch, call.kv.heads, kv_head, 0, row);
  const float sink = call.sinks == nullptr ? -INFINITY : call.sinks[head];
  const Sequence sequence = sequence_of(call.kv, call.news, batch);
  const auto out = Pointer<Any>::to(call.out, call.q.dtype) + index * width;
  const auto put = [&](int64_t i, float value) {
    cuda::store<cuda::Access::single>(out + i, cuda::Floats<1>(value), 1);
  };
  cuda::wait_for_previous();
  if (sequence.wrong || token >= sequence.count) {
    const float value = sequence.wrong ? NAN : 0.0f;
    for (int64_t i = threadIdx.x; i < width; i += kMergeThreads) put(i, value);
    if (threadIdx.x == 0) call.lse[index] = sequence.wrong ? NAN : -INFINITY;
    return;
  }
  const Chunks chunks = chunks_of(sequence, call.window);
  const int count = int(chunks.end - chunks.first);
  // Two columns, of which there may be none.
  const float* const mine[2] = {first + ::min(int64_t(threadIdx.x), padded),
                                first + ::min(int64_t(threadIdx.x) + kMergeThreads, padded)};
  float values[2] = {}, ahead[kAtATime];
  const auto read_ahead = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      if (begin + i < count) ahead[i] = __ldcg(mine[0] + (begin + i) * step);
    }
  };
  read_ahead(0);
  float largest = cuda::larger(-INFINITY, sink);
  for (int i = threadIdx.x; i < count; i += kMergeThreads) {
    largest = cuda::larger(largest, __ldcg(first + i * step + padded + 1));
  }
  shares[threadIdx.x] = largest;
  __syncthreads();
#pragma unroll 8
  for (float each : shares) largest = cuda::larger(largest, each);
  const float shift = cuda::shift_of_largest(largest);
  float total = ::expf(sink - shift);
  for (int begin = 0; begin < count; begin += kMergeThreads) {
    const int here = ::min(count - begin, kMergeThreads);
    __syncthreads();
    if (int(threadIdx.x) < here) {
      const float* const partial = first + (begin + threadIdx.x) * step + padded;
      shares[threadIdx.x] = ::expf(__ldcg(partial + 1) - shift);
      sums[threadIdx.x] = __ldcg(partial);
    }
    __syncthreads();
    for (int from = 0; from < here; from += kAtATime) {
      if (begin + from > 0) read_ahead(begin + from);
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) {
        if (from + i >= here) break;
        total = __fmaf_rn(shares[from + i], sums[from + i], total);
        values[0] = __fmaf_rn(shares[from + i], ahead[i], values[0]);
      }
      if (width <= kMergeThreads) continue;
#pragma unroll 8
      for (int i = 0; i < kAtATime; ++i) {
        if (from + i >= here) break;
        values[1] =
            __fmaf_rn(shares[from + i], __ldcg(mine[1] + (begin + from + i) * step), values[1]);
      }
    }
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int64_t place = threadIdx.x + k * kMergeThreads;
    if (place < width) put(place, values[k] * inverse);
  }
  if (threadIdx.x == 0) call.lse[index] = ::logf(total) + shift;
}
static_assert(kLargestWidth <= 2 * kMergeThreads);

struct Device {
  int processors = 0, major = 0, minor = 0, shared_bytes = 0;

  Device() {
    int device = 0;
    cuda::check(cudaGetDevice(&device), kOp);
    const auto read = [&](int& value, cudaDeviceAttr attribute) {
      cuda::check(cudaDeviceGetAttribute(&value, attribute, device), kOp);
    };
    read(processors, cudaDevAttrMultiProcessorCount);
    read(major, cudaDevAttrComputeCapabilityMajor);
    read(minor, cudaDevAttrComputeCapabilityMinor);
    read(shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (major >= 8) return;
    throw std::runtime_error(std::string(kOp) + ": the device has compute capability " +
                             std::to_string(major) + "." + std::to_string(minor) +
                             ", expected 8.0 or newer");
  }
};

void launch(void (*kernel)(DecodeAttention, Partials), const Device& device, int shared_bytes,
            int64_t parts, const DecodeAttention& call, const Partials& partials,
            cudaStream_t stream) {
  const int64_t units = call.news.batches * call.kv.heads * partials.chunks * parts;
  if (units > INT32_MAX) {
    throw std::runtime_error(std::string(kOp) + ": the cache has " + std::to_string(units) +
                             " chunks of slots and heads, expected at most 2^31 - 1");
  }
  if (shared_bytes > 48 * 1024) {
    cuda::check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        kOp);
  }
  int resident = 0;
  cuda::check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kDecodeThreads,
                                                            size_t(shared_bytes)),
              kOp);
  const int64_t blocks = std::min<int64_t>(units, int64_t(device.processors) * resident);
  if (blocks == 0) return;
  const bool chained = cuda::can_chain(kernel, kOp);
  cuda::launch_kernel(kernel, {unsigned(blocks), kDecodeThreads, shared_bytes, 1, chained}, stream,
                      kOp, call, partials);
}

// Whether all of keys and values can be read 16 bytes at a time.
bool are_aligned(const PagedKv& kv) {
  const uint64_t bytes = DSX_KV::kQuantized ? 1 : uint64_t(bytes_of(kv.dtype));
  const uint64_t distances = uint64_t(kv.of_page | kv.of_head | kv.of_token | kv.width) * bytes;
  const uint64_t places =
      uint64_t(reinterpret_cast<uintptr_t>(kv.keys)) | reinterpret_cast<uintptr_t>(kv.values);
  return (distances | places) % 16 == 0 && uint64_t(kv.of_token) * bytes <= INT32_MAX;
}

template <class T>
void launch_mma(const Device& device, const DecodeAttention& call, const Partials& partials,
                cudaStream_t stream) {
  const auto with_width = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const bool whole = call.kv.width == kWidth;
    launch(whole ? cuda::decode_mma_kernel<T, DSX_KV, kWidth, true>
                 : cuda::decode_mma_kernel<T, DSX_KV, kWidth, false>,
           device, cuda::kMmaSharedBytes<kWidth>, ceil_div(partials.rows, cuda::kUnitRows), call,
           partials, stream);
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
  const Device device;
  const Partials partials(call, workspace);
  const cudaStream_t queue = cudaStream_t(stream);
  const bool same = DSX_KV::kQuantized || call.q.dtype == call.kv.dtype;
  if (same && call.q.dtype == Dtype::bfloat16 && are_aligned(call.kv)) {
    launch_mma<BFloat16>(device, call, partials, queue);
  } else if (same && call.q.dtype == Dtype::float16 && are_aligned(call.kv)) {
    launch_mma<Half>(device, call, partials, queue);
  } else {
    launch(cuda::decode_any_kernel<DSX_KV>, device, 0, 1, call, partials, queue);
  }
  const int64_t rows = call.news.batches * call.news.tokens * call.q.heads;
  // It reads lengths before it waits, as the kernel before it has waited for them: if there is one.
  const bool chained = partials.chunks > 0 && cuda::can_chain(merge_kernel, kOp);
  cuda::launch_kernel(merge_kernel, {unsigned(rows), kMergeThreads, 0, 1, chained}, queue, kOp,
                      call, partials);
}

}  // namespace dsx
