// The torch side of rope_append_, also as a part of append_and_attend_: checks, tensors into the
// struct, the run on the device that this is compiled for.
#pragma once

#include "common/torch/device.h"
#include "common/torch/weight_offset.h"
#include "attention/cache/paged_kv_ops.h"
#include "attention/cache/rope_append.h"

namespace dsx {

using torch::stable::Tensor;

// Reads the arguments of one call; this object keeps the copies that it makes of unusual layouts.
class RopeAppendReader {
 public:
  RopeAppendReader(const char* op, const TensorView& q, const PagedKv& kv) : op_(op), q_(q) {
    call.kv = kv;
    check(kv.width >= 1 && kv.width <= kLargestAppendedWidth, op, ": keys has head_dim ", kv.width,
          ", expected 1 to ", kLargestAppendedWidth);
  }

  // [batch, tokens, heads, head_dim]; one that is written cannot be a copy.
  Heads read_heads(const Item& item, TensorView view, int64_t heads, bool written) {
    check_device(op_, item, view, q_);
    check(view.dim == 4, op_, ": ", item, " has shape ", Integers{view.sizes, view.dim},
          ", expected [batch, tokens, heads, head_dim]");
    const int64_t want[] = {q_.sizes[0], q_.sizes[1], heads, call.kv.width};
    check(std::equal(want, want + 4, view.sizes), op_, ": ", item, " has shape ",
          Integers{view.sizes, view.dim}, ", expected ", Integers{want, 4});
    const Dtype dtype = storage_dtype(op_, item, view);
    check_memory(op_, item, view);
    if (view.sizes[3] > 1 && view.strides[3] != 1) {
      check(!written || view.numel == 0, op_, ": ", item, " has strides ",
            Integers{view.strides, view.dim}, ", expected 1 for the last dimension");
      copies_.push_back(contiguous_copy(view));
      view = TensorView(copies_.back().get());
    }
    if (written) check_no_overlap(op_, item, view);
    return {view.data, heads, view.strides[0], view.strides[1], view.strides[2], dtype};
  }

  HeadWeight read_weight(const Item& item, const OptionalTensor& tensor) {
    if (!tensor.has_value()) return {};
    const TensorView view(tensor->get());
    check_device(op_, item, view, q_);
    check_flat(op_, item, view);
    check(view.numel == call.kv.width, op_, ": ", item, " has shape ",
          Integers{view.sizes, view.dim}, ", expected [", call.kv.width, "]");
    const Dtype dtype = storage_dtype(op_, item, view);
    check_memory(op_, item, view);
    return {view.data, dtype};
  }

  void read_frequencies(const OptionalTensor& tensor) {
    if (!tensor.has_value()) return;
    const TensorView view(tensor->get());
    check_device(op_, {"frequencies"}, view, q_);
    check_flat(op_, {"frequencies"}, view);
    check(2 * view.numel <= call.kv.width, op_, ": frequencies has shape ",
          Integers{view.sizes, view.dim}, ", expected at most [", call.kv.width / 2,
          "], half of head_dim");
    const bool is_double = view.dtype == aoti_torch_dtype_float64();
    check(is_double || view.dtype == aoti_torch_dtype_float32(), op_, ": frequencies is ",
          DtypeCode{view.dtype}, ", expected float64 or float32");
    check_memory(op_, {"frequencies"}, view);
    call.pairs = view.numel;
    call.frequencies = {view.data, is_double};
  }

  void read_violations(const Tensor& violations) {
    const TensorView flag(violations.get());
    check_device(op_, {"violations"}, flag, q_);
    check(flag.dtype == aoti_torch_dtype_int32() && flag.numel == 1, op_, ": violations is ",
          DtypeCode{flag.dtype}, " of ", flag.numel, " elements, expected int32 of 1");
    call.violations = reinterpret_cast<int32_t*>(flag.data);
  }

  RopeAppend call = {};

 private:
  const char* op_;
  TensorView q_;
  std::vector<Tensor> copies_;
};

// What an op that appends is called with beside q, k, v and the cache.
struct RopeAppendOptions {
  const OptionalTensor &frequencies, &q_weight, &k_weight;
  bool interleaved;
  const char* name_of_scale;
  double scale, eps, weight_offset;
};

// Nothing that is written shares memory with anything else.
inline void check_separate(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                           const Tensor& violations, const PagedKvTensors& kv,
                           const RopeAppendOptions& options, bool q_is_written) {
  SeparateTensors tensors(op, 14);
  tensors.add({"q"}, TensorView(q.get()), q_is_written ? Use::write : Use::read);
  tensors.add({"k"}, TensorView(k.get()), Use::read);
  tensors.add({"v"}, TensorView(v.get()), Use::read);
  tensors.add({"keys"}, TensorView(kv.keys.get()), Use::write);
  tensors.add({"values"}, TensorView(kv.values.get()), Use::write);
  tensors.add({"violations"}, TensorView(violations.get()), Use::write);
  tensors.add_if_given({"key_scales"}, kv.key_scales, Use::write);
  tensors.add_if_given({"value_scales"}, kv.value_scales, Use::write);
  tensors.add({"table"}, TensorView(kv.table.get()), Use::read);
  tensors.add({"lengths"}, TensorView(kv.lengths.get()), Use::read);
  tensors.add_if_given({"slots"}, kv.slots, Use::read);
  tensors.add_if_given({"counts"}, kv.counts, Use::read);
  tensors.add_if_given({"frequencies"}, options.frequencies, Use::read);
  tensors.add_if_given({"q_weight"}, options.q_weight, Use::read);
  tensors.add_if_given({"k_weight"}, options.k_weight, Use::read);
}

// Checks everything. The result is written where q is, or, if that is not to be written, nowhere
// yet.
inline RopeAppendReader read_append(const char* op, const Tensor& q, const Tensor& k,
                                    const Tensor& v, const Tensor& violations,
                                    const PagedKvTensors& tensors, const RopeAppendOptions& options,
                                    bool q_is_written) {
  const TensorView q_view(q.get());
  check(q_view.dim == 4, op, ": q has shape ", Integers{q_view.sizes, q_view.dim},
        ", expected [batch, tokens, heads, head_dim]");
  PagedKvReader kv_reader(op, tensors, q_view);
  RopeAppendReader reader(op, q_view, kv_reader.kv);
  RopeAppend& call = reader.call;
  call.news = kv_reader.read_new(tensors, q_view);
  call.q = reader.read_heads({"q"}, q_view, q_view.sizes[2], q_is_written);
  if (q_is_written) call.q_out = call.q;
  call.k = reader.read_heads({"k"}, TensorView(k.get()), call.kv.heads, false);
  call.v = reader.read_heads({"v"}, TensorView(v.get()), call.kv.heads, false);
  call.q_weight = reader.read_weight({"q_weight"}, options.q_weight);
  call.k_weight = reader.read_weight({"k_weight"}, options.k_weight);
  reader.read_frequencies(options.frequencies);
  reader.read_violations(violations);
  call.scale = finite_float(op, options.name_of_scale, options.scale);
  call.eps = finite_float(op, "eps", options.eps);
  call.weight_offset = finite_weight_offset(op, options.weight_offset);
  check(options.eps >= 0, op, ": eps is ", options.eps, ", expected 0 or more");
  check_separate(op, q, k, v, violations, tensors, options, q_is_written);
  call.interleaved = options.interleaved;
  return reader;
}

#ifdef USE_CUDA
inline void run(const RopeAppend& call, int device) {
  rope_append_cuda(call, OnDevice(device).stream);
}
#else
inline void run(const RopeAppend& call, int /*device*/) {
  constexpr int64_t kElementsPerThread = 32768;  // some 10 us: less is not worth a thread
  const int64_t elements = (call.q.heads + 2 * call.kv.heads) * call.kv.width;  // of a token
  in_parallel(call.news.batches * call.news.tokens, elements, kElementsPerThread,
              [&](Isa isa, int64_t begin, int64_t end) { rope_append_cpu(isa, call, begin, end); });
}
#endif

}  // namespace dsx
