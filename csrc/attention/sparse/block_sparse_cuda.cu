// block_sparse_attention on CUDA: makes the lists, and chooses kernels. Tensor cores leave what is
// not finite: there a weight of 0 is a product all the same. So they note the tokens whose results
// are not finite, and those are done again in float32, where it has no part.
#include "common/cuda/chain.cuh"
#include "attention/sparse/block_sparse_any_cuda.cuh"
#include "attention/sparse/block_sparse_launch_cuda.cuh"

namespace dsx {
namespace {

using namespace cuda;

// Memory of the device, handed out piece by piece; null: counts bytes.
class Space {
 public:
  explicit Space(void* begin) : begin_(static_cast<char*>(begin)) {}

  template <class T>
  T* take(int64_t count) {
    char* const here = begin_ == nullptr ? nullptr : begin_ + used_;
    used_ += ceil_div(count * int64_t(sizeof(T)), int64_t(256)) * 256;
    return reinterpret_cast<T*>(here);
  }
  int64_t used() const { return used_; }

 private:
  char* begin_;
  int64_t used_ = 0;
};

int64_t strips_of(const BlockSparse& call) { return ceil_div(call.tokens, int64_t(kAnyLanes)); }

TileLists lists_in(Space& space, const BlockSparse& call) {
  const int64_t tiles = ceil_div(call.tokens, int64_t(tile_tokens(call.block)));
  const int64_t heads = call.layout_of_heads ? call.heads : 1;
  TileLists lists;
  lists.counts = space.take<int32_t>(heads * tiles);
  lists.entries = space.take<uint32_t>(heads * tiles * call.blocks());
  lists.tiles = int(tiles), lists.blocks = int(call.blocks());
  lists.of_heads = call.layout_of_heads;
  return lists;
}

struct ForwardSpace {
  TileLists rows;
  uint32_t* spoiled;

  ForwardSpace(Space& space, const BlockSparse& call) {
    rows = lists_in(space, call);
    spoiled = space.take<uint32_t>(call.batches * call.heads * strips_of(call));
  }
};

struct BackwardSpace {
  TileLists rows, columns;
  RowNumbers* numbers;
  uint32_t *spoiled_rows, *spoiled_columns;

  BackwardSpace(Space& space, const BlockSparse& call) {
    rows = lists_in(space, call), columns = lists_in(space, call);
    numbers = space.take<RowNumbers>(call.batches * call.heads * call.tokens);
    spoiled_rows = space.take<uint32_t>(call.batches * call.heads * strips_of(call));
    spoiled_columns = space.take<uint32_t>(call.batches * call.kv_heads * strips_of(call));
  }
};

void check_size(int64_t blocks, const char* what) {
  if (blocks <= INT32_MAX) return;
  throw std::runtime_error(std::string(kSparseName) + ": q has " + std::to_string(blocks) + " " +
                           what + ", expected at most 2^31 - 1");
}

void make_lists(const BlockSparse& call, LayoutView layout, bool of_rows, const TileLists& lists,
                cudaStream_t stream) {
  const int64_t heads = lists.of_heads ? call.heads : 1;
  if (heads == 0) return;
  if (!of_rows) std::swap(layout.of_row, layout.of_column);
  const int group = ::max(1, tile_tokens(call.block) / call.block);
  const ListsTask task{layout, lists, group, call.causal, of_rows};
  const dim3 blocks(unsigned(lists.tiles), unsigned(heads));
  switch (layout.bytes) {
    case 1: lists_kernel<uint8_t><<<blocks, kListThreads, 0, stream>>>(task); break;
    case 4: lists_kernel<int32_t><<<blocks, kListThreads, 0, stream>>>(task); break;
    default: lists_kernel<int64_t><<<blocks, kListThreads, 0, stream>>>(task);
  }
  check(cudaGetLastError(), kSparseName);
}

template <Direction kDirection>
void launch_any(const SparseTask& task, const Device& device, cudaStream_t stream) {
  const bool of_keys = kDirection == Direction::columns;
  const int64_t heads = of_keys ? task.call.kv_heads : task.call.heads;
  const int64_t strips = task.call.batches * heads * strips_of(task.call);
  if (strips == 0) return;
  AnyMemory memory(int(task.call.width), kAnyMost);
  if (memory.bytes() > device.shared_of_block) memory.most = 1;
  const auto kernel = any_kernel<kDirection>;
  allow_shared_memory(kernel, memory.bytes(), kSparseName);
  const int64_t blocks = task.spoiled == nullptr ? strips : ceil_div(strips, int64_t(kAnyChunk));
  kernel<<<unsigned(blocks), kAnyThreads, size_t(memory.bytes()), stream>>>(task, memory);
  check(cudaGetLastError(), kSparseName);
}

// Whether tokens can be read 16 bytes at a time.
bool is_aligned(const HeadTokens& tokens) {
  const uint64_t strides = uint64_t(tokens.of_batch | tokens.of_head | tokens.of_token) * 2;
  return (strides | reinterpret_cast<uintptr_t>(tokens.data)) % 16 == 0;
}

// Whether tensor cores can do it: what follows of dtypes, sizes and scale, so that the bits do not
// depend on how tensors lie in memory, which are copied where they cannot be read like this.
bool suits_tensor_cores(const BlockSparse& call) {
  const Dtype dtype = call.q.dtype;
  return dtype != Dtype::float32 && call.k.dtype == dtype && call.v.dtype == dtype &&
         call.width % 8 == 0 && call.width <= 128 && call.scale >= 1e-30f && call.scale <= 1e30f &&
         is_aligned(call.q) && is_aligned(call.k) && is_aligned(call.v);
}

// Calls the launcher of the dtype; false: it was not launched.
template <class Launch>
bool with_type(Dtype dtype, const Launch& launch) {
  return dtype == Dtype::bfloat16 ? launch(BFloat16()) : launch(Half());
}

}  // namespace

int64_t attend_workspace_cuda(const BlockSparse& call) {
  Space space(nullptr);
  ForwardSpace(space, call);
  return space.used();
}

int64_t backward_workspace_cuda(const BlockSparseBackward& call) {
  Space space(nullptr);
  BackwardSpace(space, call.forward);
  return space.used();
}

void attend_cuda(const BlockSparse& call, const LayoutView& layout, void* workspace,
                 void* stream_) {
  check(cudaPeekAtLastError(), kSparseName);  // of somebody before
  const Device device(kSparseName);
  const cudaStream_t stream = cudaStream_t(stream_);
  check_size(call.batches * call.heads * strips_of(call), "strips of tokens");
  Space memory(workspace);
  const ForwardSpace space(memory, call);
  make_lists(call, layout, true, space.rows, stream);
  SparseTask task = {};
  task.call = call, task.lists = space.rows, task.tile = tile_tokens(call.block);
  task.spoiled = space.spoiled;
  const bool launched = suits_tensor_cores(call) && with_type(call.q.dtype, [&](auto type) {
    return launch_attend<decltype(type)>(task, device, stream);
  });
  if (!launched) task.spoiled = nullptr;
  launch_any<Direction::forward>(task, device, stream);
}

void backward_cuda(const BlockSparseBackward& call, const LayoutView& layout, void* workspace,
                   void* stream_) {
  check(cudaPeekAtLastError(), kSparseName);
  const Device device(kSparseName);
  const cudaStream_t stream = cudaStream_t(stream_);
  const BlockSparse& forward = call.forward;
  check_size(forward.batches * forward.heads * forward.tokens, "rows");
  Space memory(workspace);
  const BackwardSpace space(memory, forward);
  SparseTask task = {};
  task.call = forward, task.tile = tile_tokens(forward.block);
  task.grad_out = call.grad_out, task.numbers = space.numbers;
  task.grad_q = call.grad_q, task.grad_k = call.grad_k, task.grad_v = call.grad_v;
  const int64_t rows = forward.batches * forward.heads * forward.tokens;
  if (rows > 0) {
    const unsigned blocks = unsigned(ceil_div(rows, int64_t(kNumberThreads / 32)));
    numbers_kernel<<<blocks, kNumberThreads, 0, stream>>>(task, call.grad_lse);
    check(cudaGetLastError(), kSparseName);
  }
  const bool suits = suits_tensor_cores(forward) && is_aligned(call.grad_out) &&
                     call.grad_out.dtype == forward.q.dtype;
  const Dtype dtype = forward.q.dtype;
  if (call.grad_q.data != nullptr && rows > 0) {
    make_lists(forward, layout, true, space.rows, stream);
    task.lists = space.rows, task.spoiled = space.spoiled_rows;
    const bool launched = suits && with_type(dtype, [&](auto type) {
      return launch_backward_rows<decltype(type)>(task, device, stream);
    });
    if (!launched) task.spoiled = nullptr;
    launch_any<Direction::rows>(task, device, stream);
  }
  if (call.grad_k.data != nullptr) {
    make_lists(forward, layout, false, space.columns, stream);
    task.lists = space.columns, task.spoiled = space.spoiled_columns;
    const bool launched = suits && with_type(dtype, [&](auto type) {
      return launch_backward_columns<decltype(type)>(task, device, stream);
    });
    if (!launched) task.spoiled = nullptr;
    launch_any<Direction::columns>(task, device, stream);
  }
}

}  // namespace dsx
