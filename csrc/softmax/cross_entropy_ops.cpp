// The torch side of cross_entropy, for the device that this is compiled for. The schemas are in
// deepspeed_ext/ops/softmax_and_loss/cross_entropy.py.
#include <algorithm>

#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "common/torch/rows.h"
#include "softmax/cross_entropy.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

constexpr const char* kCrossEntropy = "cross_entropy";

// The arguments that all forms of the op have.
struct CrossEntropyReader {
  const char* op;
  TensorView view;  // of the logits
  RowReader reader;
  CrossEntropy call = {};
  Tensor targets;  // keeps a copy of them, perhaps

  CrossEntropyReader(const char* name, const Tensor& logits, const Tensor& target, int64_t ignored,
                     double label_smoothing, double z_loss)
      : op(name), view(logits.get()), reader(name) {
    const RowShape shape(op, {"logits"}, view);
    call.rows = shape.rows;
    call.length = shape.length;
    call.logits = reader.read({"logits"}, view);
    check(shape.length > 0 || shape.rows == 0, op, ": logits has shape ",
          Integers{view.sizes, view.dim}, ", expected one class at least");
    read_targets(target);
    call.ignored = ignored;
    check(label_smoothing >= 0 && label_smoothing <= 1, op, ": label_smoothing is ",
          label_smoothing, ", expected a number from 0 to 1");
    check(z_loss >= 0, op, ": z_loss is ", z_loss, ", expected 0 or more");
    call.label_smoothing = float(label_smoothing);
    call.z_loss = finite_float(op, "z_loss", z_loss);
  }

  void read_targets(const Tensor& target) {
    const Item item{"target"};
    const TensorView got(target.get());
    check_device(op, item, got, view);
    check(got.dtype == aoti_torch_dtype_int64(), op, ": target is ", DtypeCode{got.dtype},
          ", expected int64");
    bool same = got.dim == view.dim - 1;
    for (int64_t i = 0; same && i < got.dim; ++i) same = got.sizes[i] == view.sizes[i];
    check(same, op, ": target has shape ", Integers{got.sizes, got.dim}, ", expected ",
          Integers{view.sizes, view.dim - 1});
    check_memory(op, item, got);
    targets = got.is_contiguous() ? target : contiguous_copy(got);
    call.targets = static_cast<const int64_t*>(targets.data_ptr());
  }
};

Reduction reduction_of(const char* op, int64_t reduction) {
  check(reduction >= 0 && reduction <= 2, op, ": reduction is ", reduction,
        ", expected 0 (none), 1 (mean) or 2 (sum)");
  return Reduction(reduction);
}

Tensor new_floats(const int64_t* sizes, int64_t dim, const TensorView& beside) {
  return new_tensor(sizes, dim, torch_code(Dtype::float32), beside);
}

struct Losses {
  Tensor loss, stats, divisor;
};

#ifdef USE_CUDA
void run(const CrossEntropy& call, Reduction reduction, float* divisor, float* loss, int device) {
  const OnDevice on(device);
  count_targets_cuda(call, reduction, divisor, on.stream);
  cross_entropy_cuda(call, on.stream);
  if (loss != nullptr) add_losses_cuda(call, loss, on.stream);
}

void run_backward(const CrossEntropy& call, int device) {
  const OnDevice on(device);
  cross_entropy_backward_cuda(call, on.stream);
}

void scale(Rows rows, int64_t count, int64_t length, RowFactors factors, int device) {
  const OnDevice on(device);
  scale_rows_cuda(rows, count, length, factors, on.stream);
}
#else
constexpr int64_t kElementsPerThread = 16384;  // some 5 us: less is not worth a thread

void check_targets(const char* op, const CrossEntropy& call) {
  for (int64_t row = 0; row < call.rows; ++row) {
    const int64_t target = call.targets[row];
    check(target == call.ignored || (target >= 0 && target < call.length), op, ": target has ",
          target, " as its element number ", row, ", expected 0 to ", call.length - 1, ", or ",
          call.ignored, " for a row that is ignored");
  }
}

void run(const CrossEntropy& call, Reduction reduction, float* divisor, float* loss,
         int /*device*/) {
  check_targets(kCrossEntropy, call);
  const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
  *divisor = 1;
  if (reduction == Reduction::mean) {
    *divisor = float(call.rows - std::count(call.targets, call.targets + call.rows, call.ignored));
  }
  if (call.magnification != nullptr) *call.magnification = magnification_of(call, *divisor);
  torch::stable::parallel_for(
      0, call.rows, grain_of(call.length, kElementsPerThread),
      [&](int64_t begin, int64_t end) { cross_entropy_cpu(isa, call, begin, end); });
  if (loss == nullptr) return;
  double sum = 0;
  for (int64_t row = 0; row < call.rows; ++row) sum += double(call.losses[row]);
  *loss = float(sum / double(*divisor));
}

void run_backward(const CrossEntropy& call, int /*device*/) {
  check_targets("cross_entropy_backward", call);
  in_parallel(call.rows, call.length, kElementsPerThread, [&](Isa isa, int64_t begin, int64_t end) {
    cross_entropy_backward_cpu(isa, call, begin, end);
  });
}

void scale(Rows rows, int64_t count, int64_t length, RowFactors factors, int /*device*/) {
  in_parallel(count, length, kElementsPerThread, [&](Isa isa, int64_t begin, int64_t end) {
    scale_rows_cpu(isa, rows, length, factors, begin, end);
  });
}
#endif

// Works out all that forward has; gradients too if call.grad is wanted.
Losses losses_of(CrossEntropyReader& arguments, Reduction reduction) {
  CrossEntropy& call = arguments.call;
  const TensorView& view = arguments.view;
  const int64_t stats_sizes[] = {2, call.rows};
  const bool is_reduced = reduction != Reduction::none;
  Tensor stats = new_floats(stats_sizes, 2, view);
  Tensor divisor = new_floats(nullptr, 0, view);
  Tensor loss = new_floats(view.sizes, is_reduced ? 0 : view.dim - 1, view);
  Tensor of_rows = is_reduced ? new_floats(&call.rows, 1, view) : loss;
  call.stats = static_cast<float*>(stats.data_ptr());
  call.losses = static_cast<float*>(of_rows.data_ptr());
  float* divisor_address = static_cast<float*>(divisor.data_ptr());
  call.divisor = divisor_address;
  float* sum = is_reduced ? static_cast<float*>(loss.data_ptr()) : nullptr;
  run(call, reduction, divisor_address, sum, view.device_index);
  return {std::move(loss), std::move(stats), std::move(divisor)};
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                 int64_t ignored, double label_smoothing,
                                                 double z_loss, int64_t reduction) {
  CrossEntropyReader arguments(kCrossEntropy, logits, target, ignored, label_smoothing, z_loss);
  const Reduction kind = reduction_of(kCrossEntropy, reduction);
  Losses found = losses_of(arguments, kind);
  return {std::move(found.loss), std::move(found.stats), std::move(found.divisor)};
}

// Rows that are written as they lie.
void check_in_place(const char* op, const Item& item, const TensorView& view, const Rows& rows,
                    int64_t count, int64_t length) {
  const bool is_copy = view.numel > 0 && rows.data != view.data;
  const bool apart = count < 2 || (rows.pitch >= length && rows.group == 0);
  check(!is_copy && apart, op, ": ", item, " has strides ", Integers{view.strides, view.dim},
        " for shape ", Integers{view.sizes, view.dim},
        ", expected rows in one piece each, at equal distances and apart");
}

// Overwrites the logits with their gradients times what is returned beside the loss.
std::tuple<Tensor, Tensor> cross_entropy_in_place(const Tensor& logits, const Tensor& target,
                                                  int64_t ignored, double label_smoothing,
                                                  double z_loss, int64_t reduction) {
  CrossEntropyReader arguments(kCrossEntropy, logits, target, ignored, label_smoothing, z_loss);
  const Reduction kind = reduction_of(kCrossEntropy, reduction);
  CrossEntropy& call = arguments.call;
  check_in_place(kCrossEntropy, {"logits"}, arguments.view, call.logits, call.rows, call.length);
  SeparateTensors tensors(kCrossEntropy, 2);
  tensors.add({"logits"}, arguments.view, Use::write);
  tensors.add({"target"}, TensorView(target.get()), Use::read);
  call.grad = call.logits;
  Tensor magnification = new_floats(nullptr, 0, arguments.view);
  call.grad_loss = call.magnification = static_cast<float*>(magnification.data_ptr());
  return {std::move(losses_of(arguments, kind).loss), std::move(magnification)};
}

void check_floats(const char* op, const Item& item, const TensorView& got,
                  const TensorView& beside) {
  check_device(op, item, got, beside);
  check_dtype(op, item, got, Dtype::float32);
  check_memory(op, item, got);
}

void check_one_number(const char* op, const Item& item, const TensorView& view) {
  check(view.numel == 1, op, ": ", item, " has shape ", Integers{view.sizes, view.dim},
        ", expected []");
}

// A number for each row, or one for all.
int64_t pitch_of_factors(const char* op, const TensorView& got, const TensorView& rows) {
  check_floats(op, {"grad_loss"}, got, rows);
  if (got.dim == 0) return 0;
  bool same = got.dim == rows.dim - 1;
  for (int64_t i = 0; same && i < got.dim; ++i) same = got.sizes[i] == rows.sizes[i];
  check(same, op, ": grad_loss has shape ", Integers{got.sizes, got.dim}, ", expected [] or ",
        Integers{rows.sizes, rows.dim - 1});
  return 1;
}

// The factors, contiguous; `copy` keeps them.
const float* read_factors(const char* op, const Tensor& tensor, const TensorView& rows,
                          int64_t& pitch, Tensor& copy) {
  const TensorView view(tensor.get());
  pitch = pitch_of_factors(op, view, rows);
  copy = view.is_contiguous() ? tensor : contiguous_copy(view);
  return static_cast<const float*>(copy.data_ptr());
}

Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& logits, const Tensor& target,
                              const Tensor& stats, const Tensor& divisor, int64_t ignored,
                              double label_smoothing, double z_loss) {
  constexpr const char* op = "cross_entropy_backward";
  CrossEntropyReader arguments(op, logits, target, ignored, label_smoothing, z_loss);
  CrossEntropy& call = arguments.call;
  const TensorView& view = arguments.view;
  const TensorView of_stats(stats.get()), of_divisor(divisor.get());
  check_floats(op, {"stats"}, of_stats, view);
  check_floats(op, {"divisor"}, of_divisor, view);
  check(of_stats.dim == 2 && of_stats.sizes[0] == 2 && of_stats.sizes[1] == call.rows, op,
        ": stats has shape ", Integers{of_stats.sizes, of_stats.dim}, ", expected [2, ", call.rows,
        "]");
  check_one_number(op, {"divisor"}, of_divisor);
  Tensor factors = divisor;
  call.grad_loss = read_factors(op, grad_loss, view, call.grad_loss_pitch, factors);
  // Hooks of saved tensors may return other strides.
  const Tensor numbers = of_stats.is_contiguous() ? stats : contiguous_copy(of_stats);
  call.stats = static_cast<float*>(numbers.data_ptr());
  call.divisor = reinterpret_cast<const float*>(of_divisor.data);
  NewRows grad(view, call.logits.dtype);
  call.grad = grad.rows;
  if (view.numel > 0) run_backward(call, view.device_index);
  return std::move(grad.tensor);
}

void cross_entropy_scale(const Tensor& grad, const Tensor& grad_loss, const Tensor& magnification) {
  constexpr const char* op = "cross_entropy_scale_";
  const TensorView view(grad.get());
  const RowShape shape(op, {"grad"}, view);
  RowReader reader(op);
  const Rows rows = reader.read({"grad"}, view);
  check_in_place(op, {"grad"}, view, rows, shape.rows, shape.length);
  const TensorView divisor(magnification.get());
  check_floats(op, {"magnification"}, divisor, view);
  check_one_number(op, {"magnification"}, divisor);
  Tensor kept = grad;
  RowFactors factors{nullptr, 0, reinterpret_cast<const float*>(divisor.data)};
  factors.numbers = read_factors(op, grad_loss, view, factors.pitch, kept);
  SeparateTensors tensors(op, 3);
  tensors.add({"grad"}, view, Use::write);
  tensors.add({"grad_loss"}, TensorView(grad_loss.get()), Use::read);
  tensors.add({"magnification"}, divisor, Use::read);
  if (view.numel > 0) {
    scale(rows, shape.rows, shape.length, factors, view.device_index);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("cross_entropy", &boxed<&cross_entropy>);
  library.impl("cross_entropy_", &boxed<&cross_entropy_in_place>);
  library.impl("cross_entropy_backward", &boxed<&cross_entropy_backward>);
  library.impl("cross_entropy_scale_", &boxed<&cross_entropy_scale>);
}

}  // namespace dsx
