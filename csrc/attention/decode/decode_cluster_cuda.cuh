// decode_attention by tensor cores in one kernel, where a slot has few chunks: a cluster of blocks
// has a row of the batch and a head of keys. Its blocks take every so many-th chunk, and send what
// each row has found there to the block that finishes the row.
#pragma once

#include "attention/decode/cluster_cuda.cuh"
#include "attention/decode/decode_append_cuda.cuh"
#include "attention/decode/decode_mma_cuda.cuh"

namespace dsx::cuda {

constexpr int kMostCluster = 8, kBlockChunks = 8;  // blocks; chunks of a block

struct ClusterBlock {
  int batch, head, rank, blocks;

  __device__ ClusterBlock(const DecodeAttention& call, int blocks)
      : rank(int(rank_in_cluster())), blocks(blocks) {
    const int cluster = int(blockIdx.x) / blocks;
    batch = cluster / int(call.kv.heads);
    head = cluster - batch * int(call.kv.heads);
  }
};

// The tasks of a block, one by one, as Tasks.
class ClusterTasks {
 public:
  __device__ ClusterTasks(const DecodeAttention& call, const ClusterBlock& block)
      : call_(&call), block_(block), index_(block.rank) {
    sequence_ = sequence_ahead(call, block.batch);
    const Chunks chunks = chunks_of(sequence_, call.window);
    first_ = int(chunks.first), count_ = int(chunks.end - chunks.first);
  }

  __device__ bool are_still_so() const {
    const Sequence now = sequence_again(*call_, block_.batch, sequence_.slot);
    return now.slot == sequence_.slot && now.length == sequence_.length &&
           now.count == sequence_.count && now.wrong == sequence_.wrong;
  }

  __device__ Task next() {
    Task task = {};
    task.there = index_ < count_;
    if (!task.there) return task;
    task.slot = int(sequence_.slot);
    task.length = int(sequence_.length);
    task.count = int(sequence_.count);
    task.seen_begin = int(seen_at(task.position(0), call_->window).begin);
    task.seen_by_last = int(seen_at(task.length - 1, call_->window).begin);
    task.batch = block_.batch;
    task.head = block_.head;
    task.index = index_;
    task.chunk = first_ + index_;
    index_ += block_.blocks;
    return task;
  }

  __device__ const Sequence& sequence() const { return sequence_; }
  __device__ int chunks() const { return count_; }  // of the whole cluster

 private:
  const DecodeAttention* call_;
  ClusterBlock block_;
  Sequence sequence_;
  int first_, count_, index_;
};

// What the warp that reads tells each of the others, beside tasks.
struct ClusterMessage {
  int chunks, count;  // of the cluster; of tokens
  bool wrong;
  AppendTarget target;
};

// What rows have found in each chunk, in the block that finishes them: those of every so many.
template <int kWidth>
struct ClusterRows {
  float4 powers[kBlockChunks * kTileRows];
  float values[kBlockChunks * kTileRows][kWidth];  // as many as `bytes` says

  static int bytes(int64_t chunks, int blocks) {
    const int rows = int(chunks) * (kTileRows / blocks);
    return int(offsetof(ClusterRows, values)) + rows * kWidth * int(sizeof(float));
  }
  __device__ static int place(int index, int row, int blocks) {
    return index * (kTileRows / blocks) + row / blocks;
  }

  // All threads that multiply have the chunk. What lies behind the rows is not sent.
  __device__ void send(const Task& task, int rows, int blocks, const Found<kWidth>& found) {
    using Row = RowOfChunks<kWidth>;
    const int row = Row::row(), i = place(task.index, row, blocks);
    if (row >= rows) return;
    Row mine;
    mine.merge_pages(found);
    const unsigned to = unsigned(row % blocks);
#pragma unroll
    for (int k = 0; k < Row::kFours; ++k) {
      float4* const near = reinterpret_cast<float4*>(values[i] + Row::element(k));
      write_in_cluster(near, blocks, to, mine.values[k]);
    }
    if (Row::is_first_thread()) {
      const Powers& found_of_row = mine.powers;
      write_in_cluster(powers + i, blocks, to, {found_of_row.sum, found_of_row.largest, 0, 0});
    }
  }

  // Puts together, in the order of the chunks, and writes the results of this block's rows, of type
  // Q: all of them at once, and in few instructions, as each is read from memory for one use.
  template <class Q>
  __device__ void finish(const DecodeAttention& call, const ClusterBlock& block,
                         const ClusterMessage& message) const {
    using Row = RowOfChunks<kWidth>;
    constexpr int kStep = Row::kThreads, kCount = kWidth / kStep, kRun = 4;
    const int row = block.rank + Row::row() * block.blocks;
    if (row >= int(call.rows())) return;
    const ResultRow result(call, block.batch, block.head, row);
    const float sink = result.sink(call);
    const int thread = int(threadIdx.x) % kStep;
    if (result.put_none<Q, kStep, kRun, kCount>(call, thread, message.wrong, message.count)) return;
    ElementsOfRow<kCount> mine = {{-INFINITY, 0}, {}};
#pragma unroll 1
    for (int index = 0; index < message.chunks; ++index) {
      const int i = place(index, row, block.blocks);
      float found[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        found[k] = values[i][ResultRow::element<kStep, kRun>(thread, k)];
      }
      const Powers of_chunk = {powers[i].y, powers[i].x};
      if (index == 0) {
        mine.powers = of_chunk;
#pragma unroll
        for (int k = 0; k < kCount; ++k) mine.values[k] = found[k];
      } else {
        mine.add(of_chunk, found);
      }
    }
    mine.template put<Q, kStep, kRun>(call, result, thread, sink);
  }
};

// What the warp that reads does, of a block.
template <bool kAppends, class Reader>
__device__ inline void read_tasks(const DecodeAttention& call, const RopeAppend& append,
                                  const ClusterBlock& block, Reader& reader,
                                  ClusterMessage (&messages)[kPageWarps]) {
  ClusterTasks tasks = reader.template find_first<ClusterTasks>(block);
  const Sequence& sequence = tasks.sequence();
  const int last = tasks.chunks() - 1, position = int(sequence.length) - 1;
  const bool here = kAppends && last >= 0 && last % block.blocks == block.rank;
  int page = -1;
  if (here) page = reader.page_beside_first(position / kPageTokens);
  if (page >= call.kv.pages) page = -1;
  const int lane = int(threadIdx.x) % 32;
  if (lane % kGroup == 0) {
    messages[lane / kGroup] = {
        last + 1, int(sequence.count), sequence.wrong, {here, page, position}};
  }
  const bool wrong = sequence.wrong || (here && page < 0);
  if (lane == 0 && wrong && kAppends) *append.violations = 1;
  reader.show_first();
  // Before the others wait for what is read: the sanitizer keeps all threads here until the last.
  wait_till_all_have_begun(block.blocks);
  reader.run(tasks);
}

// `append` counts with kAppends only. The blocks of a cluster are a power of 2.
template <class Q, class Kind, int kWidth, bool kAppends>
__global__ void __launch_bounds__(kPipelineThreads, 2)
    decode_cluster_kernel(const __grid_constant__ DecodeAttention call,
                          const __grid_constant__ RopeAppend append,
                          const __grid_constant__ TmaTiles tiles, int blocks) {
#if __CUDA_ARCH__ >= 900  // see can_chain
  using Reader = cuda::Reader<Kind, kWidth, true>;
  using Found = cuda::Found<kWidth>;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Pipeline pipeline;
  __shared__ ClusterMessage messages[kPageWarps];
  __shared__ NewToken<kWidth> token;
  const unsigned begin = unsigned(__cvta_generic_to_shared(shared_bytes));
  char* const memory = shared_bytes + (0u - begin) % kTmaTileAlignment;
  Found& found = *reinterpret_cast<Found*>(memory + tiles.stages * bytes_of_stage<Kind, kWidth>());
  auto& rows = *reinterpret_cast<ClusterRows<kWidth>*>(&found + 1);
  let_next_begin();
  if (threadIdx.x == 32 * kReadingWarp) Reader::begin(tiles, pipeline);
  __syncthreads();
  say_begun_in_cluster(blocks);
  const ClusterBlock block(call, blocks);
  const int warp = int(threadIdx.x) / 32;
  if (warp == kReadingWarp) {
    Reader reader(call, tiles, pipeline, memory);
    read_tasks<kAppends>(call, append, block, reader, messages);
  } else {
    if (kAppends && warp == 0) Append<Q, Kind, kWidth>::ask_ahead(append);
    wait_for_previous();
    if constexpr (kAppends) {
      Append<Q, Kind, kWidth> appending(append, int(call.group), found.values[0][0], token);
      appending.run(block.batch, block.head, &pipeline.begun[warp], messages[warp].target);
      page_warps_barrier();
    } else {
      wait_for(&pipeline.begun[warp], 0);
    }
    wait_till_all_have_begun(blocks);
    PageAttention<Q, Kind, kWidth, kAppends> attention(call, pipeline, memory, tiles.stages, found,
                                                       &token);
    attention.read_first();
    for (int i = 0; pipeline.task(warp, i).there; ++i) {
      const Task& task = pipeline.task(warp, i);
      attention.run(i, 0, 1);
      rows.send(task, task.count * int(call.group), blocks, found);
    }
  }
  cluster_barrier(blocks);
  if (warp != kReadingWarp) rows.template finish<Q>(call, block, messages[warp]);
#endif
}

}  // namespace dsx::cuda
