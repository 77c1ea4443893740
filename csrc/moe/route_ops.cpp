// The torch side of moe_route, for the device that this is compiled for. The schemas are in
// deepspeed_ext/ops/moe/route.py.
#include <optional>

#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "moe/assign_ops.h"
#include "moe/route.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

#ifdef USE_CUDA
void run(const Route& call, AssignReader& assign, int device) {
  const OnDevice on(device);
  assign.make_workspace(device);
  route_cuda(call, assign.call, on.stream);
}
void run(const RouteBackward& call, int device) {
  const OnDevice on(device);
  route_backward_cuda(call, on.stream);
}
#else
constexpr int64_t kElementsPerThread = 2048;  // some 5 us: less is not worth a thread

void run(const Route& call, const AssignReader& assign, int /*device*/) {
  const int64_t of_tile = tokens_of_tile(call.options.tokens);
  in_parallel(ceil_div(call.options.tokens, of_tile), of_tile * call.options.experts,
              kElementsPerThread,
              [&](Isa isa, int64_t begin, int64_t end) { route_cpu(isa, call, begin, end); });
  add_tiles_cpu(call);
  assign_cpu(assign.call);
}
void run(const RouteBackward& call, int /*device*/) {
  in_parallel(
      call.options.tokens, call.options.experts, kElementsPerThread,
      [&](Isa isa, int64_t begin, int64_t end) { route_backward_cpu(isa, call, begin, end); });
}
#endif

RouteOptions options_of(const char* op, const TensorView& logits, int64_t k, int64_t score,
                        bool normalize, double scale) {
  const RowShape shape(op, {"logits"}, logits);
  check(shape.length >= 1 && shape.length <= kMostExperts, op, ": logits has shape ",
        Integers{logits.sizes, logits.dim}, ", expected 1 to ", kMostExperts, " experts");
  check(k >= 1 && k <= shape.length, op, ": k is ", k, ", expected 1 to ", shape.length,
        ", the number of experts");
  check(score >= 0 && score <= 2, op, ": score is ", score, ", expected 0, 1 or 2");
  return {shape.rows, shape.length, k, Score(score), normalize, finite_float(op, "scale", scale)};
}

void check_groups(const char* op, const RouteOptions& options, int64_t groups,
                  int64_t topk_groups) {
  check(groups >= 1 && options.experts % std::max<int64_t>(groups, 1) == 0, op, ": groups is ",
        groups, ", expected a divisor of ", options.experts, ", the number of experts");
  check(topk_groups >= 1 && topk_groups <= groups, op, ": topk_groups is ", topk_groups,
        ", expected 1 to ", groups, ", the number of groups");
  const int64_t left = options.experts / groups * topk_groups;
  check(options.k <= left, op, ": k is ", options.k, ", expected 1 to ", left,
        ", the experts of topk_groups groups");
}

Tensor new_floats(const int64_t* sizes, int64_t dim, const TensorView& beside) {
  return new_tensor(sizes, dim, torch_code(Dtype::float32), beside);
}
float* floats_of(const Tensor& tensor) { return static_cast<float*>(tensor.data_ptr()); }

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> moe_route(
    const Tensor& logits, const OptionalTensor& bias, const OptionalTensor& seed, int64_t k,
    int64_t score, bool normalize, double scale, int64_t groups, int64_t topk_groups,
    std::optional<int64_t> capacity) {
  constexpr const char* op = "moe_route";
  const TensorView view(logits.get());
  RowReader reader(op);
  Route call = {};
  call.options = options_of(op, view, k, score, normalize, scale);
  check_groups(op, call.options, groups, topk_groups);
  call.groups = groups;
  call.topk_groups = topk_groups;
  call.logits = reader.read({"logits"}, view);
  call.bias = reader.read_vector({"bias"}, bias, call.options.experts, view);
  std::vector<int64_t> sizes(view.sizes, view.sizes + view.dim);
  sizes.back() = k;
  const int64_t tiles = ceil_div(call.options.tokens, tokens_of_tile(call.options.tokens));
  const int64_t of_tiles[] = {tiles, call.options.experts + 1};
  Tensor experts = new_tensor(sizes.data(), view.dim, aoti_torch_dtype_int64(), view);
  Tensor weights = new_floats(sizes.data(), view.dim, view);
  Tensor probability_sums = new_floats(&call.options.experts, 1, view);
  Tensor z_sum = new_floats(nullptr, 0, view), partials = new_floats(of_tiles, 2, view);
  call.chosen = static_cast<int64_t*>(experts.data_ptr());
  call.weights = floats_of(weights);
  call.partials = floats_of(partials);
  call.probability_sums = floats_of(probability_sums);
  call.z_sum = floats_of(z_sum);
  const TensorView choices(experts.get());
  AssignReader assign(op, choices, ChoiceShape(op, {"logits"}, choices), call.options.experts,
                      capacity, seed);
  assign.call.experts = call.chosen;
  run(call, assign, view.device_index);
  return {std::move(weights),          std::move(experts),
          std::move(probability_sums), std::move(z_sum),
          std::move(assign.slots),     std::move(assign.offsets),
          std::move(assign.counts),    std::move(assign.first_counts)};
}

// Gradients in float32, contiguous; null if there are none. `kept` is what holds them.
const float* read_grad(const char* op, const Item& item, const OptionalTensor& grad,
                       const int64_t* sizes, int64_t dim, const TensorView& beside,
                       OptionalTensor& kept) {
  if (!grad.has_value()) return nullptr;
  const TensorView view(grad->get());
  check_device(op, item, view, beside);
  check_dtype(op, item, view, Dtype::float32);
  bool same = view.dim == dim;
  for (int64_t i = 0; same && i < dim; ++i) same = view.sizes[i] == sizes[i];
  check(same, op, ": ", item, " has shape ", Integers{view.sizes, view.dim}, ", expected ",
        Integers{sizes, dim});
  check_memory(op, item, view);
  kept = view.is_contiguous() ? *grad : contiguous_copy(view);
  return floats_of(*kept);
}

Tensor moe_route_backward(const Tensor& logits, const Tensor& experts,
                          const OptionalTensor& grad_weights,
                          const OptionalTensor& grad_probability_sums,
                          const OptionalTensor& grad_z_sum, int64_t score, bool normalize,
                          double scale) {
  constexpr const char* op = "moe_route_backward";
  const TensorView view(logits.get());
  const WholeNumbers chosen(op, {"experts"}, experts, aoti_torch_dtype_int64(), view);
  const TensorView& choices = chosen.view;
  const ChoiceShape shape(op, {"experts"}, choices);
  RouteBackward call = {};
  call.options = options_of(op, view, shape.length, score, normalize, scale);
  const int64_t tokens = call.options.tokens, n = call.options.experts;
  check(shape.rows == tokens, op, ": experts has shape ", Integers{choices.sizes, choices.dim},
        ", expected choices of ", tokens, " tokens");
  RowReader reader(op);
  call.logits = reader.read({"logits"}, view);
  call.chosen = chosen.numbers<int64_t>();
#ifndef USE_CUDA
  for (int64_t i = 0; i < choices.numel; ++i) {
    check(call.chosen[i] >= 0 && call.chosen[i] < n, op, ": experts has ", call.chosen[i],
          " as its element number ", i, ", expected 0 to ", n - 1);
  }
#endif
  OptionalTensor of_weights, of_sums, of_z;
  call.grad_weights =
      read_grad(op, {"grad_weights"}, grad_weights, choices.sizes, choices.dim, view, of_weights);
  call.grad_probability_sums =
      read_grad(op, {"grad_probability_sums"}, grad_probability_sums, &n, 1, view, of_sums);
  call.grad_z_sum = read_grad(op, {"grad_z_sum"}, grad_z_sum, nullptr, 0, view, of_z);
  NewRows grad(view, call.logits.dtype);
  call.grad_logits = grad.rows;
  if (tokens > 0) run(call, view.device_index);
  return std::move(grad.tensor);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("moe_route", &boxed<&moe_route>);
  library.impl("moe_route_backward", &boxed<&moe_route_backward>);
}

}  // namespace dsx
