// Launches prefill_attention by tensor cores, for one type of queries; each is compiled in a file
// of its own, side by side, as that takes most of the time that the library takes. With DSX_QUERY.
#include "common/cuda/check.h"
#include "attention/prefill/prefill_launch_cuda.cuh"
#include "attention/prefill/prefill_mma_cuda.cuh"

namespace dsx::cuda {
namespace {

using Query = DSX_QUERY;
using Stored = std::conditional_t<DSX_KV::kQuantized, DSX_KV, Query>;

template <int kWidth>
bool launch(const PrefillAttention& call, cudaStream_t stream) {
  using Shape = PrefillShape<Query, Stored, kWidth>;
  constexpr int kStaticBytes =
      (Shape::kRows * int(sizeof(RowScoring)) + Shape::kWarps * Shape::kGroups * 4 + 1023) / 1024 *
      1024;
  const int most = attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStaticBytes;
  const int groups = Shape::shared_bytes(2) <= most ? 2 : 1, bytes = Shape::shared_bytes(groups);
  if (bytes > most) return false;
  const auto kernel = prefill_mma_kernel<Shape>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        kPrefillName);
  const unsigned blocks = prefill_blocks(call, Shape::kRows);
  kernel<<<blocks, groups * Shape::kThreads, size_t(bytes), stream>>>(call);
  return true;
}

}  // namespace

template <>
bool launch_prefill_mma<Query>(const PrefillAttention& call, cudaStream_t stream) {
  if (call.kv.width <= 64) return launch<64>(call, stream);
  if (call.kv.width <= 128) return launch<128>(call, stream);
  return launch<256>(call, stream);
}

}  // namespace dsx::cuda
