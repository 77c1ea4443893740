// The torch side of block_sparse_attention. The schemas are in
// deepspeed_ext/ops/attention/block_sparse_attention.py.
#include <atomic>
#include <tuple>
#include <vector>

#include "attention/sparse/block_sparse.h"
#include "attention/sparse/layout_ops.h"
#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "common/torch/new_tensor.h"

namespace dsx {
namespace {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Whether a kernel can read a tensor where it lies: the elements of a token in one piece, and on
// CUDA those of 16 bits by eights, where heads are made of eights.
bool can_be_read(const TensorView& view, int64_t element_bytes) {
  if (view.sizes[3] > 1 && view.strides[3] != 1) return false;
#ifdef USE_CUDA
  if (element_bytes == 2 && view.sizes[3] % 8 == 0) {
    uint64_t bits = reinterpret_cast<uintptr_t>(view.data);
    for (int i = 0; i < 3; ++i) bits |= view.sizes[i] > 1 ? uint64_t(view.strides[i]) * 2 : 0;
    return bits % 16 == 0;
  }
#endif
  return true;
}

// Turns the arguments of one call into what kernels see, and keeps copies of those that cannot be
// read where they lie.
class SparseReader {
 public:
  explicit SparseReader(const char* op) : op_(op) {}

  HeadTokens read(const Item& item, const TensorView& given) {
    check_memory(op_, item, given);
    TensorView view = given;
    const Dtype dtype = storage_dtype(op_, item, view);
    if (!can_be_read(view, bytes_of(dtype))) {
      copies_.push_back(contiguous_copy(view));
      view = TensorView(copies_.back().get());
    }
    int64_t strides[3];  // of what there is one of, any number would do
    for (int i = 0; i < 3; ++i) strides[i] = view.sizes[i] > 1 ? view.strides[i] : 0;
    return {view.data, dtype, strides[0], strides[1], strides[2]};
  }

  // The same for one that must have the device and the shape of `like`.
  HeadTokens read(const Item& item, const Tensor& tensor, const TensorView& like) {
    const TensorView view(tensor.get());
    check_device(op_, item, view, like);
    check_shape(op_, item, view, like);
    return read(item, view);
  }

  // A float for each token and head of q.
  float* read_floats(const Item& item, const Tensor& tensor, const TensorView& q) {
    const TensorView view(tensor.get());
    check_device(op_, item, view, q);
    check_dtype(op_, item, view, Dtype::float32);
    check(view.dim == 3 && std::equal(q.sizes, q.sizes + 3, view.sizes), op_, ": ", item,
          " has shape ", Integers{view.sizes, view.dim}, ", expected ", Integers{q.sizes, 3});
    check_memory(op_, item, view);
    if (view.is_contiguous()) return reinterpret_cast<float*>(view.data);
    copies_.push_back(contiguous_copy(view));
    return static_cast<float*>(copies_.back().data_ptr());
  }

 private:
  const char* op_;
  std::vector<Tensor> copies_;
};

HeadTokens rows_of_new(const Tensor& tensor) {
  const TensorView view(tensor.get());
  Dtype dtype = Dtype::float32;
  for (Dtype each : {Dtype::bfloat16, Dtype::float16}) {
    if (view.dtype == torch_code(each)) dtype = each;
  }
  return {view.data, dtype, view.strides[0], view.strides[1], view.strides[2]};
}

// A mask of [tokens, tokens] for heads of batches, or of keys, whose dimensions are numbers
// `of_batch` and 3 of these.
void read_mask(const char* op, const Item& item, const OptionalTensor& tensor, bool of_keys,
               bool may_choose, const TensorView& q, BlockSparse& call) {
  if (!tensor.has_value()) return;
  const TensorView view(tensor->get());
  check_device(op, item, view, q);
  const int64_t sizes[] = {q.sizes[0], q.sizes[1], q.sizes[2], q.sizes[2]};
  int64_t strides[4] = {};
  if (of_keys) {
    check(view.dim == 2 && view.sizes[0] == sizes[0] && view.sizes[1] == sizes[3], op, ": ", item,
          " has shape ", Integers{view.sizes, view.dim}, ", expected [", sizes[0], ", ", sizes[3],
          "], of batch and tokens");
    strides[0] = view.strides[0], strides[3] = view.strides[1];
  } else {
    bool fits = view.dim <= 4;
    for (int64_t i = 0; fits && i < view.dim; ++i) {
      const int64_t at = i + 4 - view.dim;
      fits = view.sizes[i] == 1 || view.sizes[i] == sizes[at];
      strides[at] = view.sizes[i] == 1 ? 0 : view.strides[i];
    }
    check(fits, op, ": ", item, " has shape ", Integers{view.sizes, view.dim},
          ", expected one that can be broadcast to ", Integers{sizes, 4});
  }
  check_memory(op, item, view);
  ScoreMask mask;
  mask.data = view.data;
  mask.of_batch = strides[0], mask.of_head = strides[1];
  mask.of_row = strides[2], mask.of_key = strides[3];
  if (may_choose && view.dtype == aoti_torch_dtype_bool()) {
    mask.kind = ScoreMask::Kind::takes_part;
  }
  for (Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16}) {
    if (view.dtype == torch_code(dtype)) mask.kind = ScoreMask::Kind::added, mask.dtype = dtype;
  }
  check(mask.kind != ScoreMask::Kind::none, op, ": ", item, " is ", DtypeCode{view.dtype},
        ", expected ", may_choose ? "bool, " : "", "float32, bfloat16 or float16");
  call.mask[call.masks++] = mask;
}

struct SparseArguments {
  const Tensor &q, &k, &v, &layout;
  const OptionalTensor &key_padding_mask, &attn_mask, &rpe;
  int64_t block;
  double scale;
  bool causal;
};

void check_shapes(const char* op, const SparseArguments& arguments, const TensorView& q) {
  check(q.dim == 4, op, ": q has shape ", Integers{q.sizes, q.dim},
        ", expected [batch, heads, tokens, head_dim]");
  check(q.sizes[3] >= 1 && q.sizes[3] <= kLargestHead, op, ": q has head_dim ", q.sizes[3],
        ", expected 1 to ", kLargestHead);
  const TensorView k(arguments.k.get()), v(arguments.v.get());
  check_device(op, {"k"}, k, q);
  check(k.dim == 4 && k.sizes[0] == q.sizes[0] && k.sizes[2] == q.sizes[2] &&
            k.sizes[3] == q.sizes[3],
        op, ": k has shape ", Integers{k.sizes, k.dim}, ", expected [", q.sizes[0], ", kv_heads, ",
        q.sizes[2], ", ", q.sizes[3], "], as q has");
  check(k.sizes[1] > 0 && q.sizes[1] % k.sizes[1] == 0, op, ": q has ", q.sizes[1],
        " heads, expected a multiple of ", k.sizes[1], ", the heads of k");
  check_device(op, {"v"}, v, q);
  check_shape(op, {"v"}, v, k);
  const int64_t block = arguments.block;
  check(block == 16 || block == 32 || block == 64 || block == 128, op, ": block is ", block,
        ", expected 16, 32, 64 or 128");
}

// All but results.
BlockSparse read_call(const char* op, const SparseArguments& arguments, SparseReader& reader,
                      Layout& layout) {
  const TensorView q(arguments.q.get());
  check_shapes(op, arguments, q);
  const TensorView k(arguments.k.get());
  BlockSparse call = {};
  call.batches = q.sizes[0], call.heads = q.sizes[1], call.kv_heads = k.sizes[1];
  call.tokens = q.sizes[2], call.width = q.sizes[3];
  call.block = int(arguments.block);
  call.scale = finite_float(op, "scale", arguments.scale);
  call.causal = arguments.causal;
  call.q = reader.read({"q"}, q);
  call.k = reader.read({"k"}, k);
  call.v = reader.read({"v"}, TensorView(arguments.v.get()));
  read_mask(op, {"rpe"}, arguments.rpe, false, false, q, call);
  read_mask(op, {"key_padding_mask"}, arguments.key_padding_mask, true, true, q, call);
  read_mask(op, {"attn_mask"}, arguments.attn_mask, false, true, q, call);
  layout.read(op, arguments.layout, q, call);
  return call;
}

#ifdef USE_CUDA
void attend(const BlockSparse& call, const Layout& layout, int32_t device) {
  const Tensor space = cuda_workspace(attend_workspace_cuda(call), device);
  const OnDevice on(device);
  attend_cuda(call, layout.given(), space.data_ptr(), on.stream);
}

void find_gradients(BlockSparseBackward& call, const Layout& layout, const TensorView& q) {
  const Tensor space = cuda_workspace(backward_workspace_cuda(call), q.device_index);
  const OnDevice on(q.device_index);
  backward_cuda(call, layout.given(), space.data_ptr(), on.stream);
}
#else
// Calls f(isa, i, i + 1) for each of [0, count), on torch's threads, each of which takes the next
// one when it is done with the last: the work of strips differs as their lists do.
template <class Function>
void share(int64_t count, double products, const Function& f) {
  constexpr double kLeast = 1 << 20;  // some 30 us
  const Isa isa = current_isa();
  const int64_t most = std::min(count, int64_t(torch::stable::get_num_threads()));
  const int64_t threads = products < kLeast ? 1 : most;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t thread = first; thread < last; ++thread) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(isa, i, i + 1);
    }
  });
}

void attend(const BlockSparse& call, const Layout& layout, int32_t /*device*/) {
  share(call.batches * call.heads * call.strips(), layout.products(call),
        [&](Isa isa, int64_t begin, int64_t end) { attend_rows_cpu(isa, call, begin, end); });
}

void find_gradients(BlockSparseBackward& call, const Layout& layout, const TensorView& q) {
  const BlockSparse& forward = call.forward;
  const Tensor deltas = new_tensor(q.sizes, 3, torch_code(Dtype::float32), q);
  call.deltas = static_cast<float*>(deltas.data_ptr());
  const double products = layout.products(forward);
  if (q.numel > 0) {
    share(
        forward.batches * forward.heads * forward.strips(), products,
        [&](Isa isa, int64_t begin, int64_t end) { backward_of_rows_cpu(isa, call, begin, end); });
  }
  if (call.grad_k.data == nullptr) return;
  share(
      forward.batches * forward.kv_heads * forward.strips(), products,
      [&](Isa isa, int64_t begin, int64_t end) { backward_of_columns_cpu(isa, call, begin, end); });
}
#endif

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& layout, const OptionalTensor& key_padding_mask,
                                   const OptionalTensor& attn_mask, const OptionalTensor& rpe,
                                   int64_t block, double scale, bool causal) {
  constexpr const char* op = "block_sparse_attention";
  SparseReader reader(op);
  Layout lists;
  BlockSparse call = read_call(
      op, {q, k, v, layout, key_padding_mask, attn_mask, rpe, block, scale, causal}, reader, lists);
  const TensorView view(q.get());
  Tensor out = new_tensor(view, call.q.dtype);
  Tensor lse = new_tensor(view.sizes, 3, torch_code(Dtype::float32), view);
  call.out = rows_of_new(out);
  call.lse = static_cast<float*>(lse.data_ptr());
  if (view.numel > 0) attend(call, lists, view.device_index);
  return {std::move(out), std::move(lse)};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const OptionalTensor& grad_lse,
                                            const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& out, const Tensor& lse,
                                            const Tensor& layout,
                                            const OptionalTensor& key_padding_mask,
                                            const OptionalTensor& attn_mask,
                                            const OptionalTensor& rpe, int64_t block, double scale,
                                            bool causal, bool needs_q, bool needs_kv) {
  constexpr const char* op = "block_sparse_attention_backward";
  SparseReader reader(op);
  Layout lists;
  BlockSparseBackward call = {};
  BlockSparse& forward = call.forward;
  forward = read_call(op, {q, k, v, layout, key_padding_mask, attn_mask, rpe, block, scale, causal},
                      reader, lists);
  const TensorView view(q.get()), of_k(k.get());
  call.grad_out = reader.read({"grad_out"}, grad_out, view);
  forward.out = reader.read({"out"}, out, view);
  forward.lse = reader.read_floats({"lse"}, lse, view);
  if (grad_lse.has_value()) call.grad_lse = reader.read_floats({"grad_lse"}, *grad_lse, view);
  const int64_t none[] = {0};
  const auto make = [&](bool needs, const TensorView& like, Dtype dtype, HeadTokens& tokens) {
    Tensor made = needs ? new_tensor(like, dtype) : new_tensor(none, 1, torch_code(dtype), like);
    if (needs) tokens = rows_of_new(made);
    return made;
  };
  Tensor grad_q = make(needs_q, view, forward.q.dtype, call.grad_q);
  Tensor grad_k = make(needs_kv, of_k, forward.k.dtype, call.grad_k);
  Tensor grad_v = make(needs_kv, of_k, forward.v.dtype, call.grad_v);
  if (of_k.numel > 0) find_gradients(call, lists, view);
  return {std::move(grad_q), std::move(grad_k), std::move(grad_v)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("block_sparse_attention", &boxed<&forward>);
  library.impl("block_sparse_attention_backward", &boxed<&backward>);
}

}  // namespace dsx
