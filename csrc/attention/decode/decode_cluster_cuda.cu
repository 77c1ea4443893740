// decode_attention on CUDA in one kernel, and rope_append_ in the same: chooses when.
#include "attention/decode/decode_cluster_cuda.cuh"

#include <algorithm>

namespace dsx {
namespace {

constexpr const char* kOp = "decode_attention";

// How many blocks a cluster has; 0 where one of them would have too much to do. So many that all
// processors are busy, as long as each has a chunk, or as many as it takes; no more, as a block
// goes on reading while it multiplies, and one that is yet to begin does not.
int blocks_of_cluster(const DecodeAttention& call, int64_t chunks, int processors) {
  const int64_t clusters = call.news.batches * call.kv.heads;
  int blocks = 1;
  while (blocks < cuda::kMostCluster && blocks < chunks &&
         (blocks * cuda::kBlockChunks < chunks || 2 * blocks * clusters <= processors)) {
    blocks *= 2;
  }
  return blocks * cuda::kBlockChunks < chunks ? 0 : blocks;
}

template <class Q, int kWidth, bool kAppends>
bool launch(const DecodeAttention& call, const RopeAppend& append, const cuda::Device& device,
            int64_t chunks, int blocks, cudaStream_t stream) {
  const auto kernel = cuda::decode_cluster_kernel<Q, DSX_KV, kWidth, kAppends>;
  if (!cuda::can_chain(kernel, kOp)) return false;
  const int64_t all = call.news.batches * call.kv.heads * blocks;
  const int rows = cuda::ClusterRows<kWidth>::bytes(chunks, blocks);
  const int besides = cuda::static_shared_bytes(kernel, kOp) + rows;
  const int stages = cuda::stages_in<DSX_KV, kWidth>(device, all > device.processors, besides);
  if (stages < cuda::kTogether) return false;  // wide heads, where a block has less shared memory
  const auto tiles = cuda::tma_tiles_of<DSX_KV, kWidth>(call.kv, stages);
  if (!tiles.there) return false;
  const int bytes = cuda::mma_shared_bytes<DSX_KV, kWidth>(tiles.stages) + rows;
  const cuda::Launch made = {unsigned(all), cuda::kPipelineThreads, bytes, blocks, true};
  cuda::launch_kernel(kernel, made, stream, kOp, call, append, tiles, blocks);
  return true;
}

}  // namespace

bool decode_in_clusters_cuda(const DecodeAttention& call, const RopeAppend* append, void* stream) {
  const cuda::Device device(kOp);
  const int64_t chunks = cuda::Partials(call, nullptr).chunks;
  const int64_t tasks = call.news.batches * call.kv.heads * chunks;
  // Where there is much to do, it matters more that all processors have the same of it.
  if (tasks == 0 || tasks >= cuda::kMuch * device.processors) return false;
  // Without the new token it is only one launch less, and blocks do not have the same to do.
  const bool short_ones = chunks <= cuda::kMostCluster && tasks <= 4 * device.processors;
  if (append == nullptr && !short_ones) return false;
  if (call.rows() > cuda::kTileRows) return false;
  if (append != nullptr && (append->k.dtype != call.q.dtype || append->v.dtype != call.q.dtype)) {
    return false;
  }
  const int blocks = blocks_of_cluster(call, chunks, device.processors);
  if (blocks == 0) return false;
  return cuda::with_mma<DSX_KV>(call, [&](auto q, auto width) {
    constexpr int kWidth = decltype(width)::value;
    const auto queue = cudaStream_t(stream);
    if (append == nullptr) {
      return launch<decltype(q), kWidth, false>(call, {}, device, chunks, blocks, queue);
    }
    return launch<decltype(q), kWidth, true>(call, *append, device, chunks, blocks, queue);
  });
}

}  // namespace dsx
