// decode_attention on CUDA: chooses a kernel for the chunks, and puts together what they find.
#include "transformer/decode_attention.h"

#include <algorithm>
#include <string>

#include "common/cuda/check.h"
#include "transformer/decode_any_cuda.cuh"
#include "transformer/decode_mma_cuda.cuh"

namespace dsx {
namespace {

using cuda::kDecodeThreads;
using cuda::Partials;

constexpr const char* kOp = "decode_attention";

// A block has a row, and goes through its chunks in their order.
__global__ void __launch_bounds__(kDecodeThreads)
    merge_kernel(const __grid_constant__ DecodeAttention call,
                 const __grid_constant__ Partials partials) {
  __shared__ float shares[kDecodeThreads], sums[kDecodeThreads];
  const int64_t index = blockIdx.x, heads = call.q.heads, width = call.kv.width;
  const int64_t batch = index / (call.news.tokens * heads);
  const int64_t token = index / heads % call.news.tokens, head = index % heads;
  const Sequence sequence = sequence_of(call.kv, call.news, batch);
  const auto out = Pointer<Any>::to(call.out, call.q.dtype) + index * width;
  const auto put = [&](int64_t i, float value) {
    cuda::store<cuda::Access::single>(out + i, cuda::Floats<1>(value), 1);
  };
  if (sequence.wrong || token >= sequence.count) {
    const float value = sequence.wrong ? NAN : 0.0f;
    for (int64_t i = threadIdx.x; i < width; i += kDecodeThreads) put(i, value);
    if (threadIdx.x == 0) call.lse[index] = sequence.wrong ? NAN : -INFINITY;
    return;
  }
  const Chunks chunks = chunks_of(sequence, call.window);
  const int64_t padded = padded_width(width), row = token * call.group + head % call.group;
  const float* const first =
      partials.at(batch, call.kv.heads, head / call.group, chunks.first, row);
  const int64_t count = chunks.end - chunks.first, step = partials.rows * partials.floats;
  const float sink = call.sinks == nullptr ? -INFINITY : call.sinks[head];
  float largest = cuda::larger(-INFINITY, sink);
  for (int64_t i = threadIdx.x; i < count; i += kDecodeThreads) {
    largest = cuda::larger(largest, first[i * step + padded + 1]);
  }
  shares[threadIdx.x] = largest;
  __syncthreads();
  for (float each : shares) largest = cuda::larger(largest, each);
  const float shift = cuda::shift_of_largest(largest);
  float total = ::expf(sink - shift), values[2] = {};
  for (int64_t begin = 0; begin < count; begin += kDecodeThreads) {
    const int here = int(::min(count - begin, int64_t(kDecodeThreads)));
    __syncthreads();
    if (threadIdx.x < here) {
      const float* const partial = first + (begin + threadIdx.x) * step + padded;
      shares[threadIdx.x] = ::expf(partial[1] - shift);
      sums[threadIdx.x] = partial[0];
    }
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < here; ++i) {
      const float* const partial = first + (begin + i) * step;
      total = __fmaf_rn(shares[i], sums[i], total);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int64_t place = threadIdx.x + k * kDecodeThreads;
        if (place < width) values[k] = __fmaf_rn(shares[i], partial[place], values[k]);
      }
    }
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int64_t place = threadIdx.x + k * kDecodeThreads;
    if (place < width) put(place, values[k] * inverse);
  }
  if (threadIdx.x == 0) call.lse[index] = ::logf(total) + shift;
}
static_assert(kLargestWidth <= 2 * kDecodeThreads);

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

template <class Kernel>
void launch(Kernel* kernel, const Device& device, int shared_bytes, int blocks_at_most,
            const DecodeAttention& call, const Partials& partials, cudaStream_t stream) {
  if (shared_bytes > 0) {
    cuda::check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        kOp);
  }
  const int64_t parts = ceil_div(partials.rows, cuda::kUnitRows);
  const int64_t units = call.news.batches * call.kv.heads * partials.chunks * parts;
  if (units > INT32_MAX) {
    throw std::runtime_error(std::string(kOp) + ": the cache has " + std::to_string(units) +
                             " chunks of slots and heads, expected at most 2^31 - 1");
  }
  const int64_t blocks = std::min<int64_t>(units, int64_t(device.processors) * blocks_at_most);
  if (blocks == 0) return;
  kernel<<<unsigned(blocks), kDecodeThreads, size_t(shared_bytes), stream>>>(call, partials);
  cuda::check(cudaGetLastError(), kOp);
}

bool are_aligned(const PagedKv& kv) {
  const uint64_t bytes = uint64_t(bytes_of(kv.dtype));
  const uint64_t distances = uint64_t(kv.of_page | kv.of_head | kv.of_token) * bytes;
  const uint64_t places =
      uint64_t(reinterpret_cast<uintptr_t>(kv.keys)) | reinterpret_cast<uintptr_t>(kv.values);
  return (distances | places) % 16 == 0;
}

// Whether it was launched: it is for two kinds of storage, as they usually lie.
bool launch_mma(const Device& device, const DecodeAttention& call, const Partials& partials,
                cudaStream_t stream) {
  if constexpr (!DSX_KV::kQuantized) {
    if (call.kv.dtype == Dtype::float32 || call.q.dtype != call.kv.dtype) return false;
    if (!are_aligned(call.kv)) return false;
    bool launched = false;
    const auto with_width = [&](auto storage, auto width) {
      using T = decltype(storage);
      if constexpr (sizeof(T) == 2) {
        constexpr int kWidth = decltype(width)::value;
        constexpr int kBytes = cuda::MmaShape<kWidth>::kSharedBytes;
        if (kBytes + 1024 > device.shared_bytes) return;
        launch(cuda::decode_mma_kernel<T, kWidth>, device, kBytes, kWidth <= 128 ? 2 : 1, call,
               partials, stream);
        launched = true;
      }
    };
    with_storage_type(call.kv.dtype, [&](auto storage) {
      if (call.kv.width <= 64) {
        with_width(storage, std::integral_constant<int, 64>{});
      } else if (call.kv.width <= 128) {
        with_width(storage, std::integral_constant<int, 128>{});
      } else {
        with_width(storage, std::integral_constant<int, 256>{});
      }
    });
    return launched;
  }
  return false;
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
  if (!launch_mma(device, call, partials, queue)) {
    launch(cuda::decode_any_kernel<DSX_KV>, device, 0, 8, call, partials, queue);
  }
  const int64_t rows = call.news.batches * call.news.tokens * call.q.heads;
  merge_kernel<<<unsigned(rows), kDecodeThreads, 0, queue>>>(call, partials);
  cuda::check(cudaGetLastError(), kOp);
}

}  // namespace dsx
