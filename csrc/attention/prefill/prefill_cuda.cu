// prefill_attention on CUDA: chooses a kernel.
#include "attention/prefill/prefill_any_cuda.cuh"
#include "attention/prefill/prefill_launch_cuda.cuh"

namespace dsx {
namespace {

void check_capability() {
  const int major = cuda::attribute_of_device(cudaDevAttrComputeCapabilityMajor);
  const int minor = cuda::attribute_of_device(cudaDevAttrComputeCapabilityMinor);
  if (major >= 8) return;
  throw std::runtime_error(std::string(cuda::kPrefillName) +
                           ": the device has compute capability " + std::to_string(major) + "." +
                           std::to_string(minor) + ", expected 8.0 or newer");
}

// Whether keys and values can be read 16 bytes at a time.
bool are_aligned(const PagedKv& kv) {
  const uint64_t bytes = DSX_KV::kQuantized ? 1 : uint64_t(bytes_of(kv.dtype));
  const uint64_t distances = uint64_t(kv.of_page | kv.of_head | kv.of_token) * bytes;
  const uint64_t places =
      uint64_t(reinterpret_cast<uintptr_t>(kv.keys)) | reinterpret_cast<uintptr_t>(kv.values);
  return (distances | places) % 16 == 0;
}

// Whether scores are products with keys, scaled by what keeps their order, and no more.
bool is_plain(const PrefillAttention& call) {
  return call.soft_cap <= 0 && call.alibi_slopes == nullptr && call.scale > 0;
}

// Whether it was launched. Which kernel it is depends on the cache and on options, and never on how
// many tokens are new: a prompt may be cut.
template <class Query>
bool launch_for(const PrefillAttention& call, cudaStream_t stream) {
  if (is_plain(call) && cuda::launch_prefill_warpgroups<Query>(call, stream)) return true;
  return cuda::launch_prefill_mma<Query>(call, stream);
}

bool launch_mma(const PrefillAttention& call, cudaStream_t stream) {
  if (!DSX_KV::kQuantized && call.q.dtype != call.kv.dtype) return false;
  if (!are_aligned(call.kv)) return false;
  const bool is_brain = call.q.dtype == Dtype::bfloat16, is_half = call.q.dtype == Dtype::float16;
  if (is_brain) return launch_for<BFloat16>(call, stream);
  return is_half && launch_for<Half>(call, stream);
}

}  // namespace

void prefill_attention_cuda(const PrefillAttention& call, void* stream) {
  cuda::check(cudaPeekAtLastError(), cuda::kPrefillName);  // of somebody before
  check_capability();
  const cudaStream_t queue = cudaStream_t(stream);
  if (!launch_mma(call, queue)) {
    const unsigned blocks = cuda::prefill_blocks(call, cuda::kAnyRows);
    cuda::prefill_any_kernel<DSX_KV><<<blocks, cuda::kAnyThreads, 0, queue>>>(call);
  }
  cuda::check(cudaGetLastError(), cuda::kPrefillName);
}

}  // namespace dsx
