// The torch side of rope, for the device that this is compiled for. The schemas are in
// deepspeed_ext/ops/attention/rope.py.
#include <algorithm>

#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "common/torch/rows.h"
#include "attention/cache/rope.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

struct RopeOptions {
  bool interleaved, heads_first;
  double scale;
  bool negative;
};

// Which dimension counts what, of q and k: (..., tokens, heads, width), or heads before tokens.
struct HeadShape {
  int64_t batches = 1, tokens, heads, width;
  int64_t token_dim, head_dim;

  HeadShape(const char* op, const Item& item, const TensorView& view, bool heads_first) {
    check(view.dim >= 3, op, ": ", item, " has shape ", Integers{view.sizes, view.dim},
          ", expected 3 dimensions at least");
    token_dim = view.dim - (heads_first ? 2 : 3);
    head_dim = view.dim - (heads_first ? 3 : 2);
    tokens = view.sizes[token_dim];
    heads = view.sizes[head_dim];
    width = view.sizes[view.dim - 1];
    for (int64_t i = 0; i < view.dim - 3; ++i) batches *= view.sizes[i];
  }
};

// The one stride of the first `count` dimensions together, if they have one: as if they were one.
bool has_joint_stride(const TensorView& view, int64_t count, int64_t& stride) {
  stride = 0;
  int64_t elements = 1;  // of the dimensions looked at so far
  for (int64_t i = count - 1; i >= 0; --i) {
    if (view.sizes[i] == 1) continue;
    if (elements == 1) stride = view.strides[i];
    if (view.strides[i] != elements * stride) return false;
    elements *= view.sizes[i];
  }
  return true;
}

bool heads_of(const TensorView& view, const HeadShape& shape, Dtype dtype, Heads& heads) {
  heads = {view.data, shape.heads, 0, view.strides[shape.token_dim], view.strides[shape.head_dim],
           dtype};
  const bool whole = shape.width < 2 || view.strides[view.dim - 1] == 1;
  return (whole && has_joint_stride(view, view.dim - 3, heads.of_batch)) || view.numel == 0;
}

// Reads the arguments of one call; this object keeps the copies that it makes of unusual layouts.
class RopeReader {
 public:
  RopeReader(const char* op, const Tensor& q, const Tensor& positions, const Tensor& frequencies,
             const RopeOptions& options)
      : op_(op), view_(q.get()), shape_(op, {"q"}, view_, options.heads_first), options_(options) {
    call.batches = shape_.batches;
    call.tokens = shape_.tokens;
    call.width = shape_.width;
    call.interleaved = options.interleaved;
    call.negative = options.negative;
    call.scale = finite_float(op, "scale", options.scale);
    read_frequencies(TensorView(frequencies.get()));
    read_positions(TensorView(positions.get()));
  }

  // `item` is what errors call it. A tensor that is written cannot be a copy.
  Heads read(const Item& item, const TensorView& view, bool written) {
    check_device(op_, item, view, view_);
    const HeadShape shape(op_, item, view, options_.heads_first);
    bool fits =
        view.dim == view_.dim && shape.tokens == shape_.tokens && shape.width == shape_.width;
    for (int64_t i = 0; fits && i < view.dim - 3; ++i) fits = view.sizes[i] == view_.sizes[i];
    check(fits, op_, ": ", item, " has shape ", Integers{view.sizes, view.dim},
          ", expected that of q, ", Integers{view_.sizes, view_.dim},
          ", but for the number of heads");
    const Dtype dtype = storage_dtype(op_, item, view);
    check_memory(op_, item, view);
    Heads heads;
    if (heads_of(view, shape, dtype, heads)) return heads;
    check(!written, op_, ": ", item, " has strides ", Integers{view.strides, view.dim},
          ", expected 1 for the last dimension and one distance between batches");
    copies_.push_back(contiguous_copy(view));
    heads_of(TensorView(copies_.back().get()), shape, dtype, heads);
    return heads;
  }

  Tensor new_result(const TensorView& view, Heads& heads) {
    Tensor result = new_tensor(view, heads.dtype);
    const HeadShape shape(op_, {"q"}, view, options_.heads_first);
    Heads made;
    heads_of(TensorView(result.get()), shape, heads.dtype, made);
    heads = made;
    return result;
  }

  const TensorView& view() const { return view_; }

  Rope call = {};

 private:
  void read_frequencies(TensorView view) {
    check_device(op_, {"frequencies"}, view, view_);
    check(view.dim == 1 && 2 * view.numel <= shape_.width, op_, ": frequencies has shape ",
          Integers{view.sizes, view.dim}, ", expected one dimension of at most ", shape_.width / 2,
          ", half of q's last one");
    const bool is_double = view.dtype == aoti_torch_dtype_float64();
    check(is_double || view.dtype == aoti_torch_dtype_float32(), op_, ": frequencies is ",
          DtypeCode{view.dtype}, ", expected float64 or float32");
    check_memory(op_, {"frequencies"}, view);
    if (view.numel > 1 && view.strides[0] != 1) view = copy_of(view);
    call.pairs = view.numel;
    call.frequencies = {view.data, is_double};
  }

  void read_positions(TensorView view) {
    check_device(op_, {"positions"}, view, view_);
    const bool is_long = view.dtype == aoti_torch_dtype_int64();
    check(is_long || view.dtype == aoti_torch_dtype_int32(), op_, ": positions is ",
          DtypeCode{view.dtype}, ", expected int64 or int32");
    const int64_t leading = view_.dim - 3;
    bool fits = view.dim == 1 || view.dim == leading + 1;
    for (int64_t i = 0; fits && i < view.dim - 1; ++i) fits = view.sizes[i] == view_.sizes[i];
    fits = fits && view.sizes[view.dim - 1] == shape_.tokens;
    std::vector<int64_t> want(view_.sizes, view_.sizes + leading);
    want.push_back(shape_.tokens);
    check(fits, op_, ": positions has shape ", Integers{view.sizes, view.dim}, ", expected [",
          shape_.tokens, "] or ", Integers{want.data(), int64_t(want.size())});
    check_memory(op_, {"positions"}, view);
    int64_t of_batch = 0;
    if (!has_joint_stride(view, view.dim - 1, of_batch)) {
      view = copy_of(view);
      has_joint_stride(view, view.dim - 1, of_batch);
    }
    call.positions = {view.data, is_long, of_batch, view.strides[view.dim - 1]};
  }

  TensorView copy_of(const TensorView& view) {
    copies_.push_back(contiguous_copy(view));
    return TensorView(copies_.back().get());
  }

  const char* op_;
  TensorView view_;  // of q
  HeadShape shape_;
  RopeOptions options_;
  std::vector<Tensor> copies_;
};

#ifdef USE_CUDA
void run(const Rope& call, int device) {
  const OnDevice on(device);
  rope_cuda(call, on.stream);
}
#else
constexpr int64_t kElementsPerThread = 32768;  // some 10 us: less is not worth a thread

void run(const Rope& call, int /*device*/) {
  const int64_t elements = (call.q.heads + call.k.heads) * call.width;  // of a token
  in_parallel(call.batches * call.tokens, elements, kElementsPerThread,
              [&](Isa isa, int64_t begin, int64_t end) { rope_cpu(isa, call, begin, end); });
}
#endif

void run_rope(const RopeReader& reader) {
  const Rope& call = reader.call;
  const bool empty = call.batches == 0 || call.tokens == 0 || call.width == 0;
  if (!empty && call.q.heads + call.k.heads > 0) run(call, reader.view().device_index);
}

Tensor rope(const Tensor& q, const Tensor& positions, const Tensor& frequencies, bool interleaved,
            bool heads_first, double scale, bool negative) {
  RopeReader reader("rope", q, positions, frequencies, {interleaved, heads_first, scale, negative});
  reader.call.q = reader.call.q_out = reader.read({"q"}, reader.view(), false);
  Tensor out = reader.new_result(reader.view(), reader.call.q_out);
  run_rope(reader);
  return out;
}

std::tuple<Tensor, Tensor> rope_pair(const Tensor& q, const Tensor& k, const Tensor& positions,
                                     const Tensor& frequencies, bool interleaved, bool heads_first,
                                     double scale, bool negative) {
  RopeReader reader("rope", q, positions, frequencies, {interleaved, heads_first, scale, negative});
  const TensorView k_view(k.get());
  reader.call.q = reader.call.q_out = reader.read({"q"}, reader.view(), false);
  reader.call.k = reader.call.k_out = reader.read({"k"}, k_view, false);
  Tensor q_out = reader.new_result(reader.view(), reader.call.q_out);
  Tensor k_out = reader.new_result(k_view, reader.call.k_out);
  run_rope(reader);
  return {std::move(q_out), std::move(k_out)};
}

void rope_in_place(const Tensor& q, const OptionalTensor& k, const Tensor& positions,
                   const Tensor& frequencies, bool interleaved, bool heads_first, double scale) {
  constexpr const char* op = "rope_";
  RopeReader reader(op, q, positions, frequencies, {interleaved, heads_first, scale, false});
  Rope& call = reader.call;
  call.in_place = true;
  check_no_overlap(op, {"q"}, reader.view());
  call.q = call.q_out = reader.read({"q"}, reader.view(), true);
  if (k.has_value()) {
    const TensorView k_view(k->get());
    check_no_overlap(op, {"k"}, k_view);
    call.k = call.k_out = reader.read({"k"}, k_view, true);
  }
  SeparateTensors tensors(op, 4);
  tensors.add({"q"}, reader.view(), Use::write);
  tensors.add_if_given({"k"}, k, Use::write);
  tensors.add({"positions"}, TensorView(positions.get()), Use::read);
  tensors.add({"frequencies"}, TensorView(frequencies.get()), Use::read);
  run_rope(reader);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("rope", &boxed<&rope>);
  library.impl("rope.pair", &boxed<&rope_pair>);
  library.impl("rope_", &boxed<&rope_in_place>);
}

}  // namespace dsx
