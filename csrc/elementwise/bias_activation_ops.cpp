// The torch side of bias_activation, for the device that this is compiled for. The schemas are in
// deepspeed_ext/ops/elementwise/bias_activation.py.
#include <algorithm>
#include <memory>

#include "common/math.h"
#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "elementwise/activation_ops.h"
#include "elementwise/bias_activation.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

#ifdef USE_CUDA
void run(const BiasActivation& call, int device) {
  const OnDevice on(device);
  bias_activation_cuda(call, on.stream);
}

void run_backward(BiasActivationBackward call, Rows grad_bias, int device) {
  const OnDevice on(device);
  const int64_t groups = bias_activation_groups_cuda(call.rows);
  call.sums = grad_bias;
  if (grad_bias.data == nullptr || groups == 1)
    return bias_activation_backward_cuda(call, on.stream);
  const Tensor workspace = cuda_workspace(groups * call.length * int64_t(sizeof(float)), device);
  float* partials = static_cast<float*>(workspace.data_ptr());
  call.sums = {partials, call.length, Dtype::float32};
  bias_activation_backward_cuda(call, on.stream);
  add_bias_partials_cuda(partials, groups, call.length, grad_bias, on.stream);
}
#else
void run(const BiasActivation& call, int /*device*/) { run_elements(call, &bias_activation_cpu); }

void run_backward(BiasActivationBackward call, Rows grad_bias, int /*device*/) {
  const Isa isa = current_isa();
  const int64_t groups = ceil_div(call.rows, kRowsOfGroup);
  std::unique_ptr<float[]> partials;
  call.sums = grad_bias;
  if (grad_bias.data != nullptr && groups != 1) {
    partials.reset(new float[size_t(groups * call.length)]);
    call.sums = {partials.get(), call.length, Dtype::float32};
  }
  const int64_t tiles = groups * ceil_div(call.length, kColumnsOfTile);
  const int64_t of_tile = std::min(call.rows, kRowsOfGroup) * std::min(call.length, kColumnsOfTile);
  torch::stable::parallel_for(
      0, tiles, grain_of(of_tile, kElementsPerThread),
      [&](int64_t begin, int64_t end) { bias_activation_backward_cpu(isa, call, begin, end); });
  if (partials == nullptr) return;
  torch::stable::parallel_for(0, call.length, grain_of(groups, kElementsPerThread),
                              [&](int64_t begin, int64_t end) {
    add_bias_partials_cpu(isa, partials.get(), groups, call.length, begin, end, grad_bias);
  });
}
#endif

Tensor bias_activation(const Tensor& x, const OptionalTensor& bias, int64_t activation) {
  constexpr const char* op = "bias_activation";
  const TensorView view(x.get());
  auto call = call_over<BiasActivation>(op, {"x"}, view, activation);
  RowReader reader(op);
  call.x = reader.read({"x"}, view);
  call.bias = reader.read_vector({"bias"}, bias, call.length, view);
  NewRows out(view, call.x.dtype);
  call.out = out.rows;
  if (call.bias.data == nullptr) join_rows(call, {&call.x, &call.out});
  if (view.numel > 0) run(call, view.device_index);
  return std::move(out.tensor);
}

// The gradient of the bias is empty if it is not wanted or there is no bias.
std::tuple<Tensor, Tensor> bias_activation_backward(const Tensor& grad_out, const Tensor& x,
                                                    const OptionalTensor& bias, int64_t activation,
                                                    bool needs_grad_bias) {
  constexpr const char* op = "bias_activation_backward";
  const TensorView view(x.get());
  auto call = call_over<BiasActivationBackward>(op, {"x"}, view, activation);
  RowReader reader(op);
  call.grad_out = reader.read({"grad_out"}, grad_out, view);
  call.x = reader.read({"x"}, view);
  call.bias = reader.read_vector({"bias"}, bias, call.length, view);
  const bool has_grad_bias = needs_grad_bias && bias.has_value();
  const int64_t bias_length = has_grad_bias ? call.length : 0;
  NewRows grad_x(view, call.x.dtype);
  call.grad_x = grad_x.rows;
  Tensor grad_bias = new_tensor(&bias_length, 1, torch_code(call.bias.dtype), view);
  const Rows bias_row{has_grad_bias ? grad_bias.data_ptr() : nullptr, 0, call.bias.dtype};
  if (!bias.has_value()) join_rows(call, {&call.grad_out, &call.x, &call.grad_x});
  run_backward(call, bias_row, view.device_index);
  return {std::move(grad_x.tensor), std::move(grad_bias)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("bias_activation", &boxed<&bias_activation>);
  library.impl("bias_activation_backward", &boxed<&bias_activation_backward>);
}

}  // namespace dsx
