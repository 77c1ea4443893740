// The torch side of moe_permute and moe_unpermute, for the device that this is compiled for. The
// schemas are in deepspeed_ext/ops/moe/permute.py.
#include <algorithm>
#include <vector>

#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "moe/moe_ops.h"
#include "moe/permute.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

// The slots and what goes with them.
struct SlotReader {
  const char* op;
  WholeNumbers places, offsets;
  Slots slots;

  SlotReader(const char* name, const Tensor& slot, const Tensor& offset, int64_t rows,
             const TensorView& beside)
      : op(name),
        places(op, {"slots"}, slot, aoti_torch_dtype_int64(), beside),
        offsets(op, {"offsets"}, offset, aoti_torch_dtype_int32(), beside) {
    const ChoiceShape shape(op, {"slots"}, places.view);
    const TensorView& ends = offsets.view;
    check(ends.dim == 1 && ends.numel > 0, op, ": offsets has shape ",
          Integers{ends.sizes, ends.dim}, ", expected a number for each expert, one at least");
    slots = {shape.rows, shape.length, rows, places.numbers<int64_t>(),
             offsets.numbers<int32_t>() + ends.numel - 1};
#ifndef USE_CUDA
    check_values();
#endif
  }

  // Each row before the end of the last expert is the place of one choice.
  void check_values() const {
    const int64_t end = *slots.end;
    check(end >= 0 && end <= slots.rows, op, ": offsets has ", end,
          " as its last element, expected 0 to ", slots.rows, ", the number of rows");
    choices_of_rows(op, slots.places, slots.tokens * slots.k, end);
  }

  // A tensor with a row for each token.
  void check_tokens(const Item& item, const TensorView& view) const {
    const TensorView& want = places.view;
    bool same = view.dim == want.dim;
    for (int64_t i = 0; same && i < want.dim - 1; ++i) same = view.sizes[i] == want.sizes[i];
    std::vector<int64_t> sizes(want.sizes, want.sizes + want.dim);
    if (view.dim > 0) sizes.back() = view.sizes[view.dim - 1];
    check(same, op, ": ", item, " has shape ", Integers{view.sizes, view.dim}, ", expected ",
          Integers{sizes.data(), want.dim}, " beside those slots");
  }
};

// Rows that do not exist yet, one after the other.
struct RowsOf {
  Tensor tensor;
  Rows rows;

  RowsOf(const std::vector<int64_t>& sizes, Dtype dtype, const TensorView& beside)
      : tensor(new_tensor(sizes.data(), int64_t(sizes.size()), torch_code(dtype), beside)),
        rows{tensor.data_ptr(), sizes.back(), dtype} {}
};

void check_matrix(const char* op, const Item& item, const TensorView& view) {
  check(view.dim == 2, op, ": ", item, " has shape ", Integers{view.sizes, view.dim},
        ", expected rows and columns");
}

#ifdef USE_CUDA
void run(const Permute& call, int device) {
  const OnDevice on(device);
  permute_cuda(call, on.stream);
}
void run(const Unpermute& call, int device) {
  const OnDevice on(device);
  unpermute_cuda(call, on.stream);
}
void run(const UnpermuteBackward& call, int device) {
  const OnDevice on(device);
  unpermute_backward_cuda(call, on.stream);
}
#else
constexpr int64_t kElementsPerThread = 32768;  // some 5 us: less is not worth a thread

template <class Call>
void run_tokens(const Call& call, void (*function)(Isa, const Call&, int64_t, int64_t)) {
  in_parallel(call.slots.tokens, call.length * call.slots.k, kElementsPerThread,
              [&](Isa isa, int64_t begin, int64_t end) { function(isa, call, begin, end); });
}
void run(const Permute& call, int /*device*/) {
  run_tokens(call, &permute_cpu);
  clear_rows_cpu(call.slots, call.out, call.length);
}
void run(const Unpermute& call, int /*device*/) { run_tokens(call, &unpermute_cpu); }
void run(const UnpermuteBackward& call, int /*device*/) {
  run_tokens(call, &unpermute_backward_cpu);
  clear_rows_cpu(call.slots, call.grad_y, call.length);
}
#endif

Tensor moe_permute(const Tensor& x, const Tensor& slots, const Tensor& offsets, int64_t rows) {
  constexpr const char* op = "moe_permute";
  const TensorView view(x.get());
  const RowShape shape(op, {"x"}, view);
  check(rows >= 0, op, ": rows is ", rows, ", expected 0 or more");
  const SlotReader arguments(op, slots, offsets, rows, view);
  arguments.check_tokens({"x"}, view);
  RowReader reader(op);
  Permute call = {arguments.slots, shape.length, reader.read({"x"}, view), {}};
  RowsOf out({rows, shape.length}, call.x.dtype, view);
  call.out = out.rows;
  if (shape.length > 0) run(call, view.device_index);
  return std::move(out.tensor);
}

Tensor moe_unpermute(const Tensor& y, const Tensor& slots, const Tensor& offsets,
                     const OptionalTensor& weights) {
  constexpr const char* op = "moe_unpermute";
  const TensorView view(y.get());
  check_matrix(op, {"y"}, view);
  const SlotReader arguments(op, slots, offsets, view.sizes[0], view);
  RowReader reader(op);
  Unpermute call = {arguments.slots, view.sizes[1], reader.read({"y"}, view), {}, {}};
  Tensor kept = weights.value_or(y);
  if (weights.has_value()) {
    const TensorView of_weights(weights->get());
    call.weights = read_numbers(op, {"weights"}, of_weights, arguments.places.view, kept);
  }
  std::vector<int64_t> sizes(arguments.places.view.sizes,
                             arguments.places.view.sizes + arguments.places.view.dim);
  sizes.back() = call.length;
  RowsOf out(sizes, call.y.dtype, view);
  call.out = out.rows;
  if (call.length > 0) run(call, view.device_index);
  return std::move(out.tensor);
}

std::tuple<Tensor, Tensor> moe_unpermute_backward(const Tensor& grad_out, const Tensor& y,
                                                  const Tensor& slots, const Tensor& offsets,
                                                  const Tensor& weights) {
  constexpr const char* op = "moe_unpermute_backward";
  const TensorView view(y.get()), of_grad(grad_out.get()), of_weights(weights.get());
  check_matrix(op, {"y"}, view);
  const SlotReader arguments(op, slots, offsets, view.sizes[0], view);
  arguments.check_tokens({"grad_out"}, of_grad);
  check_device(op, {"grad_out"}, of_grad, view);
  check(of_grad.sizes[of_grad.dim - 1] == view.sizes[1], op, ": grad_out has shape ",
        Integers{of_grad.sizes, of_grad.dim}, ", expected rows of ", view.sizes[1]);
  RowReader reader(op);
  Tensor kept = weights;
  UnpermuteBackward call = {};
  call.slots = arguments.slots;
  call.length = view.sizes[1];
  call.grad_out = reader.read({"grad_out"}, of_grad);
  call.y = reader.read({"y"}, view);
  call.weights = read_numbers(op, {"weights"}, of_weights, arguments.places.view, kept);
  NewRows grad_y(view, call.y.dtype);
  Tensor grad_weights = new_tensor(of_weights, call.weights.dtype);
  call.grad_y = grad_y.rows;
  call.grad_weights = {grad_weights.data_ptr(), 1, call.weights.dtype};
  run(call, view.device_index);
  return {std::move(grad_y.tensor), std::move(grad_weights)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("moe_permute", &boxed<&moe_permute>);
  library.impl("moe_unpermute", &boxed<&moe_unpermute>);
  library.impl("moe_unpermute_backward", &boxed<&moe_unpermute_backward>);
}

}  // namespace dsx
