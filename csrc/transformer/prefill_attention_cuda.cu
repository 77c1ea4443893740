// prefill_attention on CUDA: chooses a kernel.
#include "transformer/prefill_attention.h"

#include <string>

#include "common/cuda/check.h"
#include "transformer/prefill_any_cuda.cuh"
#include "transformer/prefill_mma_cuda.cuh"

namespace dsx {
namespace {

constexpr const char* kOp = "prefill_attention";

int attribute_of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cuda::check(cudaGetDevice(&device), kOp);
  cuda::check(cudaDeviceGetAttribute(&value, attribute, device), kOp);
  return value;
}

void check_capability() {
  const int major = attribute_of_device(cudaDevAttrComputeCapabilityMajor);
  const int minor = attribute_of_device(cudaDevAttrComputeCapabilityMinor);
  if (major >= 8) return;
  throw std::runtime_error(std::string(kOp) + ": the device has compute capability " +
                           std::to_string(major) + "." + std::to_string(minor) +
                           ", expected 8.0 or newer");
}

unsigned blocks_of(const PrefillAttention& call, int64_t rows_of_block) {
  const int64_t strips = ceil_div(call.rows(), rows_of_block);
  const int64_t blocks = strips * call.kv.heads * call.news.batches;
  if (blocks > INT32_MAX || call.rows() > INT32_MAX) {
    throw std::runtime_error(std::string(kOp) + ": q has " + std::to_string(blocks) +
                             " strips of tokens and heads, expected at most 2^31 - 1");
  }
  return unsigned(blocks);
}

// Whether keys and values can be read 16 bytes at a time.
bool are_aligned(const PagedKv& kv) {
  const uint64_t bytes = DSX_KV::kQuantized ? 1 : uint64_t(bytes_of(kv.dtype));
  const uint64_t distances = uint64_t(kv.of_page | kv.of_head | kv.of_token) * bytes;
  const uint64_t places =
      uint64_t(reinterpret_cast<uintptr_t>(kv.keys)) | reinterpret_cast<uintptr_t>(kv.values);
  return (distances | places) % 16 == 0;
}

// Whether it was launched: not where shared memory has no room for it.
template <class T, int kWidth>
bool launch_mma(const PrefillAttention& call, cudaStream_t stream) {
  using Stored = std::conditional_t<DSX_KV::kQuantized, DSX_KV, T>;
  constexpr int kWarps = 4, kBlocks = kWidth <= 128 ? 2 : 1;  // of a processor
  using Shape = cuda::PrefillShape<T, Stored, kWidth, kWarps, 1>;
  constexpr int kStaticBytes = 4096;  // at most
  const int room = attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStaticBytes;
  const int stages = Shape::shared_bytes(2) <= room ? 2 : 1, bytes = Shape::shared_bytes(stages);
  if (bytes > room) return false;
  const auto kernel = cuda::prefill_mma_kernel<T, Stored, kWidth, kWarps, 1, kBlocks>;
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
              kOp);
  kernel<<<blocks_of(call, Shape::kRows), Shape::kThreads, size_t(bytes), stream>>>(call, stages);
  return true;
}

template <class T>
bool launch_mma(const PrefillAttention& call, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (!are_aligned(call.kv)) return false;
    if (call.kv.width <= 64) return launch_mma<T, 64>(call, stream);
    if (call.kv.width <= 128) return launch_mma<T, 128>(call, stream);
    return launch_mma<T, 256>(call, stream);
  }
  return false;
}

}  // namespace

void prefill_attention_cuda(const PrefillAttention& call, void* stream) {
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  check_capability();
  const cudaStream_t queue = cudaStream_t(stream);
  bool launched = false;
  if (DSX_KV::kQuantized || call.q.dtype == call.kv.dtype) {
    with_storage_type(call.q.dtype,
                      [&](auto storage) { launched = launch_mma<decltype(storage)>(call, queue); });
  }
  if (!launched) {
    const unsigned blocks = blocks_of(call, cuda::kAnyRows);
    cuda::prefill_any_kernel<DSX_KV><<<blocks, cuda::kAnyThreads, 0, queue>>>(call);
  }
  cuda::check(cudaGetLastError(), kOp);
}

}  // namespace dsx
