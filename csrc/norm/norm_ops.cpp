// The torch side of the norm that DSX_NORM names, for the device that this is compiled for. The
// schemas are in deepspeed_ext/ops/norm/norms.py.
#include <algorithm>
#include <memory>
#include <string>

#include "common/math.h"
#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "common/torch/rows.h"
#include "common/torch/weight_offset.h"
#include "norm/norm.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

// The arguments that forward and backward have in common.
template <class Call>
struct NormReader {
  TensorView view;  // of x
  RowShape shape;
  RowReader reader;
  const char* op;
  Call call = {};

  NormReader(const char* name, const Tensor& x, const OptionalTensor& weight, double eps,
             double weight_offset)
      : view(x.get()), shape(name, {"x"}, view), reader(name), op(name) {
    call.rows = shape.rows;
    call.length = shape.length;
    call.x = reader.read({"x"}, view);
    call.weight = vector({"weight"}, weight);
    check(eps >= 0, op, ": eps is ", eps, ", expected a number that is 0 or more");
    call.eps = float(eps);
    call.weight_offset = finite_weight_offset(op, weight_offset);
  }

  Rows like_x(const Item& item, const OptionalTensor& tensor) {
    return reader.read(item, tensor, view);
  }
  Rows vector(const Item& item, const OptionalTensor& tensor) {
    return reader.read_vector(item, tensor, shape.length, view);
  }
  // Empty if it is not wanted.
  Tensor new_vector(bool wanted, Dtype dtype) const {
    const int64_t length = wanted ? shape.length : 0;
    return new_tensor(&length, 1, torch_code(dtype), view);
  }
};

#ifdef USE_CUDA
void run(const Norm& norm, int device) {
  const OnDevice on(device);
  norm_cuda<DSX_NORM>(norm, on.stream);
}

void run_backward(const NormBackward& norm, const OfVectors<Rows>& grads, int device) {
  const OnDevice on(device);
  const int64_t floats = norm_backward_workspace<DSX_NORM>(norm, grads);
  const Tensor workspace = cuda_workspace(floats * int64_t(sizeof(float)), device);
  norm_backward_cuda<DSX_NORM>(norm, grads, static_cast<float*>(workspace.data_ptr()), on.stream);
}
#else
constexpr int64_t kElementsPerThread = 32768;  // some 5 us: less is not worth a thread

// The gradient of a vector, which adds up over groups of rows. Few of them have memory at a time:
// they are added in their order, so it makes no difference how many.
class VectorSum {
 public:
  VectorSum(const Rows& grad, int64_t length, int64_t at_once) : grad_(grad), length_(length) {
    if (!grad.is_present()) return;  // not wanted
    partials_.reset(new float[size_t(at_once * length)]);
    totals_.reset(new double[size_t(length)]);
    std::fill_n(totals_.get(), length, 0.0);
  }

  // [at_once, length]; null: not wanted.
  float* partials() const { return partials_.get(); }

  void add(Isa isa, int64_t groups, bool are_last) const {
    if (partials_ == nullptr) return;
    const Rows target = are_last ? grad_ : Rows{};
    torch::stable::parallel_for(0, length_, grain_of(groups, kElementsPerThread),
                                [&](int64_t begin, int64_t end) {
      add_partials_cpu<DSX_NORM>(isa, partials_.get(), groups, length_, begin, end, totals_.get(),
                                 target);
    });
  }

 private:
  Rows grad_;
  int64_t length_;
  std::unique_ptr<float[]> partials_;
  std::unique_ptr<double[]> totals_;  // of the groups so far
};

// So many that their sums take under 1 % of the memory of what is read.
int64_t groups_at_once(const NormBackward& norm, const OfVectors<Rows>& grads) {
  int64_t of_group = 0;  // floats for each column
  for (const Rows* grad : {&grads.weight, &grads.bias, &grads.x_bias}) {
    of_group += grad->is_present() ? 1 : 0;
  }
  const int64_t of_column = norm.rows * (bytes_of(norm.x.dtype) + bytes_of(norm.grad_out.dtype));
  const int64_t fit = of_column / 128 / std::max<int64_t>(1, of_group * int64_t(sizeof(float)));
  return std::max<int64_t>(0, fit - 2);  // beside the totals, which are double
}

void run(const Norm& norm, int /*device*/) {
  in_parallel(norm.rows, norm.length, kElementsPerThread, [&](Isa isa, int64_t begin, int64_t end) {
    norm_cpu<DSX_NORM>(isa, norm, begin, end);
  });
}

void run_backward_by_columns(Isa isa, const NormBackward& norm, const OfVectors<Rows>& grads) {
  const std::unique_ptr<float[]> of_rows(new float[size_t(norm.rows * kFloatsOfRow)]);
  torch::stable::parallel_for(0, norm.rows, grain_of(norm.length, kElementsPerThread),
                              [&](int64_t begin, int64_t end) {
    norm_backward_rows_cpu<DSX_NORM>(isa, norm, begin, end, of_rows.get());
  });
  torch::stable::parallel_for(0, norm.length, grain_of(norm.rows, kElementsPerThread),
                              [&](int64_t begin, int64_t end) {
    norm_backward_columns_cpu<DSX_NORM>(isa, norm, of_rows.get(), begin, end, grads);
  });
}

void run_backward(const NormBackward& norm, const OfVectors<Rows>& grads, int /*device*/) {
  if (norm.length == 0) return;
  const Isa isa = current_isa();
  const int64_t of_group = rows_of_group(norm.rows);
  const int64_t groups = ceil_div(norm.rows, of_group);
  // After each time threads wait for one another.
  const int64_t at_once = std::min(groups, groups_at_once(norm, grads));
  const int64_t enough = std::min(kEnoughGroups, 2 * int64_t(torch::stable::get_num_threads()));
  if (norm.rows > 0 && at_once < std::min(groups, enough)) {
    return run_backward_by_columns(isa, norm, grads);
  }
  const VectorSum weight(grads.weight, norm.length, at_once);
  const VectorSum bias(grads.bias, norm.length, at_once);
  const VectorSum x_bias(grads.x_bias, norm.length, at_once);
  const OfVectors<float*> partials{weight.partials(), bias.partials(), x_bias.partials()};
  int64_t first = 0;
  do {
    const int64_t last = std::min(first + at_once, groups);
    torch::stable::parallel_for(first, last, grain_of(norm.length * of_group, kElementsPerThread),
                                [&](int64_t begin, int64_t end) {
      norm_backward_cpu<DSX_NORM>(isa, norm, begin, end, first, partials);
    });
    for (const VectorSum* sum : {&weight, &bias, &x_bias}) {
      sum->add(isa, last - first, last == groups);
    }
    first = last;
  } while (first < groups);
}
#endif

Tensor norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
            double weight_offset) {
  NormReader<Norm> reader(DSX_NORM::kOp, x, weight, eps, weight_offset);
  reader.call.bias = reader.vector({"bias"}, bias);
  NewRows out(reader.view, reader.call.x.dtype);
  reader.call.out = out.rows;
  if (reader.view.numel > 0) run(reader.call, reader.view.device_index);
  return std::move(out.tensor);
}

// The sum is empty if it is not wanted.
std::tuple<Tensor, Tensor> norm_residual(const Tensor& x, const Tensor& residual,
                                         const OptionalTensor& x_bias, const OptionalTensor& weight,
                                         const OptionalTensor& bias, double eps,
                                         double weight_offset, bool needs_sum) {
  NormReader<Norm> reader(DSX_NORM::kOp, x, weight, eps, weight_offset);
  Norm& call = reader.call;
  call.residual = reader.like_x({"residual"}, residual);
  call.x_bias = reader.vector({"x_bias"}, x_bias);
  call.bias = reader.vector({"bias"}, bias);
  NewRows out(reader.view, call.x.dtype);
  call.out = out.rows;
  const auto fill = [&] {
    if (reader.view.numel > 0) run(call, reader.view.device_index);
  };
  if (!needs_sum && call.residual.dtype == call.x.dtype) {
    fill();
    return {std::move(out.tensor), reader.new_vector(false, call.residual.dtype)};
  }
  NewRows sum(reader.view, call.residual.dtype);  // where dtypes differ, there is no other place
  call.sum = sum.rows;
  fill();
  Tensor kept = needs_sum ? std::move(sum.tensor) : reader.new_vector(false, call.residual.dtype);
  return {std::move(out.tensor), std::move(kept)};
}

// Of the vectors, those are wanted that are given and, of the weight, whose gradient is needed; the
// gradients of others are empty.
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward(
    const Tensor& grad_out, const OptionalTensor& grad_sum, const Tensor& x,
    const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& x_bias,
    double eps, double weight_offset, bool needs_grad_weight) {
  NormReader<NormBackward> reader(DSX_NORM::kBackwardOp, x, weight, eps, weight_offset);
  NormBackward& call = reader.call;
  call.grad_out = reader.like_x({"grad_out"}, grad_out);
  call.grad_sum = reader.like_x({"grad_sum"}, grad_sum);
  NewRows grad_x(reader.view, call.x.dtype);
  call.grad_x = grad_x.rows;
  OfVectors<Rows> grads;
  const auto new_grad = [&](bool wanted, const Rows& vector, Rows& grad) {
    Tensor tensor = reader.new_vector(wanted, vector.dtype);
    if (wanted) grad = {tensor.data_ptr(), 0, vector.dtype};
    return tensor;
  };
  Tensor grad_weight = new_grad(needs_grad_weight && weight.has_value(), call.weight, grads.weight);
  Tensor grad_bias = new_grad(bias.has_value(), reader.vector({"bias"}, bias), grads.bias);
  Tensor grad_x_bias =
      new_grad(x_bias.has_value(), reader.vector({"x_bias"}, x_bias), grads.x_bias);
  run_backward(call, grads, reader.view.device_index);
  return {std::move(grad_x.tensor), std::move(grad_weight), std::move(grad_bias),
          std::move(grad_x_bias)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  const std::string op = DSX_NORM::kOp;
  library.impl(DSX_NORM::kOp, &boxed<&norm>);
  library.impl((op + ".residual").c_str(), &boxed<&norm_residual>);
  library.impl(DSX_NORM::kBackwardOp, &boxed<&norm_backward>);
}

}  // namespace dsx
