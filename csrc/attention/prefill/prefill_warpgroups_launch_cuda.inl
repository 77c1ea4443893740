// Launches prefill_attention by groups of warps, for one type of queries; each is compiled in a
// file of its own, side by side. With DSX_QUERY.
#include <algorithm>

#include "common/cuda/check.h"
#include "common/cuda/device.cuh"
#include "attention/prefill/prefill_launch_cuda.cuh"
#include "attention/prefill/prefill_warpgroups_cuda.cuh"

namespace dsx::cuda {
namespace {

using Query = DSX_QUERY;
using Stored = std::conditional_t<DSX_KV::kQuantized, DSX_KV, Query>;

// Whether what runs on this device is code for 9.0a: other code of the kernel has nothing in it.
template <class Kernel>
bool is_there(Kernel kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), kPrefillName);
  return attributes.binaryVersion == 90 && attributes.ptxVersion == 90;
}

template <int kWidth, int kGroups, int kStages>
bool launch(const PrefillAttention& call, const Device& device, cudaStream_t stream) {
  using Shape = WarpgroupShape<Query, Stored, kWidth, kGroups, 128, kStages, true>;
  const auto kernel = prefill_warpgroups_kernel<Shape>;
  constexpr int kBytes = warpgroup_shared_bytes<Shape>();
  if (!is_there(kernel) || kBytes > device.shared_of_block) return false;
  constexpr int kElement = Shape::kCodes ? 1 : 2, kLine = Shape::kCodes ? kWidth : kLineBytes;
  PrefillMaps maps;
  const auto make = [&](CUtensorMap& map, const void* data) {
    return make_map(map, call.kv, data, kElement, kLine, kPageTokens);
  };
  if (!make(maps.keys, call.kv.keys) || !make(maps.values, call.kv.values)) return false;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        kPrefillName);
  const unsigned strips = prefill_blocks(call, Shape::kRows);
  const unsigned blocks = std::min(strips, unsigned(device.processors));
  kernel<<<blocks, Shape::kThreads, size_t(kBytes), stream>>>(call, maps);
  return true;
}

}  // namespace

template <>
bool launch_prefill_warpgroups<Query>(const PrefillAttention& call, cudaStream_t stream) {
  const Device device(kPrefillName);
  if (device.major != 9 || device.minor != 0) return false;
  // Stages as many as there is room for. What is read for narrow heads is short beside what is
  // weighed of it: 192 rows read it once where 128 would, if that leaves work for all processors.
  constexpr int kStages = DSX_KV::kQuantized ? 2 : 3;
  if constexpr (!DSX_KV::kQuantized) {
    if (call.kv.width <= 64 && prefill_blocks(call, 192) >= 4 * device.processors)
      return launch<64, 3, kStages>(call, device, stream);
  }
  if (call.kv.width <= 64) return launch<64, 2, kStages>(call, device, stream);
  return call.kv.width <= 128 && launch<128, 2, kStages>(call, device, stream);
}

}  // namespace dsx::cuda
