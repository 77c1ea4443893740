// The torch side of softmax, for the device that this is compiled for. The schemas are in
// deepspeed_ext/ops/softmax_and_loss/softmax.py.
#include <algorithm>

#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "common/torch/rows.h"
#include "common/torch/soft_cap.h"
#include "softmax/softmax.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

// Finds where a tensor has its elements for each row of x; sizes and strides are those of x's
// dimensions.
class BroadcastReader {
 public:
  BroadcastReader(const char* op, const Item& item, const TensorView& view, const TensorView& x,
                  int64_t x_dim)  // of x's dimensions, those that it is broadcast to
      : op_(op), item_(item) {
    const int64_t missing = x_dim - view.dim;
    bool fits = missing >= 0;
    for (int64_t i = 0; fits && i < view.dim; ++i) {
      fits = view.sizes[i] == 1 || view.sizes[i] == x.sizes[i + missing];
    }
    check(fits, op, ": ", item, " has shape ", Integers{view.sizes, view.dim},
          ", expected one that can be broadcast to ", Integers{x.sizes, x_dim});
    check_memory(op, item, view);
    for (int64_t i = x.dim - 2; i >= 0; --i) {  // the rows
      add(x.sizes[i], i < x_dim ? stride_of(view, i - missing) : 0);
    }
    if (rows_.dims == 1 && rows_.strides[0] == 0) rows_.dims = 0;
  }

  const BroadcastRows& rows() const { return rows_; }

  static int64_t stride_of(const TensorView& view, int64_t i) {
    return i < 0 || view.sizes[i] == 1 ? 0 : view.strides[i];
  }

 private:
  void add(int64_t size, int64_t stride) {
    if (size == 1) return;
    const int last = rows_.dims - 1;
    if (last >= 0 && stride == rows_.strides[last] * rows_.sizes[last]) {
      rows_.sizes[last] *= size;
      return;
    }
    check(rows_.dims < BroadcastRows::kMostDims, op_, ": ", item_, " has over ",
          BroadcastRows::kMostDims, " dimensions that do not join, expected so many or fewer");
    rows_.sizes[rows_.dims] = size;
    rows_.strides[rows_.dims++] = stride;
  }

  const char* op_;
  Item item_;
  BroadcastRows rows_ = {};
};

SoftmaxMask read_mask(const char* op, const OptionalTensor& tensor, bool left_out,
                      const TensorView& x) {
  SoftmaxMask mask;
  if (!tensor.has_value()) return mask;
  const Item item{"mask"};
  const TensorView view(tensor->get());
  check_device(op, item, view, x);
  mask.rows = BroadcastReader(op, item, view, x, x.dim).rows();
  mask.column_stride = BroadcastReader::stride_of(view, view.dim - 1);
  mask.data = view.data;
  if (view.dtype == aoti_torch_dtype_bool() || view.dtype == aoti_torch_dtype_uint8()) {
    mask.kind = left_out ? SoftmaxMask::Kind::left_out : SoftmaxMask::Kind::takes_part;
    return mask;
  }
  bool is_float = false;
  for (Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16}) {
    if (view.dtype != torch_code(dtype)) continue;
    mask.dtype = dtype;
    is_float = true;
  }
  check(!left_out, op, ": mask is ", DtypeCode{view.dtype},
        ", expected bool or uint8, of which what is not 0 is left out");
  check(is_float, op, ": mask is ", DtypeCode{view.dtype},
        ", expected bool, uint8, float32, bfloat16 or float16");
  mask.kind = SoftmaxMask::Kind::added;
  return mask;
}

void read_slopes(const char* op, const OptionalTensor& tensor, const TensorView& x,
                 Scores& scores) {
  if (!tensor.has_value()) return;
  const Item item{"alibi_slopes"};
  const TensorView view(tensor->get());
  check_device(op, item, view, x);
  check_dtype(op, item, view, Dtype::float32);
  check(x.dim > 1, op, ": x has shape ", Integers{x.sizes, x.dim},
        ", expected two dimensions at least, as alibi_slopes needs queries and keys");
  scores.slope_rows = BroadcastReader(op, item, view, x, x.dim - 2).rows();
  scores.slopes = reinterpret_cast<const float*>(view.data);
}

constexpr int64_t kFurthest = int64_t(1) << 53;  // so that nothing overflows

// `before` and `after` are counts of keys, or -1 for all; without an offset, the last query is at
// the last key.
Scores read_scores(const char* op, const TensorView& x, double scale, double soft_cap,
                   int64_t before, int64_t after, std::optional<int64_t> offset) {
  const float finite_scale = finite_float(op, "scale", scale);
  check_soft_cap(op, soft_cap);
  check(before >= -1 && after >= -1, op, ": window is (", before, ", ", after,
        "), expected counts of keys, or -1 for all");
  Scores scores;
  scores.scale = finite_scale;
  scores.soft_cap = float(soft_cap);
  scores.before = before < kFurthest ? before : -1;
  scores.after = after < kFurthest ? after : -1;
  const int64_t keys = x.sizes[x.dim - 1];
  if (x.dim > 1) scores.queries = x.sizes[x.dim - 2];
  scores.offset = offset.has_value() ? *offset : keys - scores.queries;
  check(scores.offset >= -kFurthest && scores.offset <= kFurthest, op, ": offset is ",
        scores.offset, ", expected one within 2^53");
  return scores;
}

#ifdef USE_CUDA
void run(const Softmax& softmax, int device) {
  const OnDevice on(device);
  softmax_cuda(softmax, on.stream);
}

void run_backward(const SoftmaxBackward& softmax, int device) {
  const OnDevice on(device);
  softmax_backward_cuda(softmax, on.stream);
}
#else
constexpr int64_t kElementsPerThread = 16384;  // some 5 us: less is not worth a thread

void run(const Softmax& softmax, int /*device*/) {
  in_parallel(softmax.rows, softmax.length, kElementsPerThread,
              [&](Isa isa, int64_t begin, int64_t end) { softmax_cpu(isa, softmax, begin, end); });
}

void run_backward(const SoftmaxBackward& softmax, int /*device*/) {
  in_parallel(
      softmax.rows, softmax.length, kElementsPerThread,
      [&](Isa isa, int64_t begin, int64_t end) { softmax_backward_cpu(isa, softmax, begin, end); });
}
#endif

Tensor softmax(const Tensor& x, const OptionalTensor& mask, const OptionalTensor& alibi_slopes,
               double scale, double soft_cap, int64_t before, int64_t after,
               std::optional<int64_t> offset, bool mask_leaves_out) {
  constexpr const char* op = "softmax";
  const TensorView view(x.get());
  const RowShape shape(op, {"x"}, view);
  RowReader reader(op);
  Softmax call = {};
  call.rows = shape.rows;
  call.length = shape.length;
  call.x = reader.read({"x"}, view);
  call.scores = read_scores(op, view, scale, soft_cap, before, after, offset);
  call.scores.mask = read_mask(op, mask, mask_leaves_out, view);
  read_slopes(op, alibi_slopes, view, call.scores);
  NewRows out(view, call.x.dtype);
  call.out = out.rows;
  if (view.numel > 0) run(call, view.device_index);
  return std::move(out.tensor);
}

// x is needed where there is a soft cap.
Tensor softmax_backward(const Tensor& grad_out, const Tensor& out, const OptionalTensor& x,
                        double scale, double soft_cap, int64_t before, int64_t after,
                        std::optional<int64_t> offset) {
  constexpr const char* op = "softmax_backward";
  const TensorView view(out.get());
  const RowShape shape(op, {"out"}, view);
  RowReader reader(op);
  SoftmaxBackward call = {};
  call.rows = shape.rows;
  call.length = shape.length;
  call.grad_out = reader.read({"grad_out"}, grad_out, view);
  call.out = reader.read({"out"}, view);
  call.scores = read_scores(op, view, scale, soft_cap, before, after, offset);
  check(x.has_value() == (soft_cap > 0), op, ": x is ", x.has_value() ? "a tensor" : "None",
        ", expected ", x.has_value() ? "None" : "a tensor", ", as softcap is ", soft_cap);
  call.x = reader.read({"x"}, x, view);
  NewRows grad_x(view, call.out.dtype);
  call.grad_x = grad_x.rows;
  if (view.numel > 0) run_backward(call, view.device_index);
  return std::move(grad_x.tensor);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("softmax", &boxed<&softmax>);
  library.impl("softmax_backward", &boxed<&softmax_backward>);
}

}  // namespace dsx
