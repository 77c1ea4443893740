// Registers the CPU kernels of the norm that DSX_NORM names; the schemas are in
// deepspeed_ext/ops/transformer/norms.py.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>

#include "common/math.h"
#include "transformer/norm_ops.h"

namespace dsx {
namespace {

constexpr int64_t kElementsPerThread = 32768;  // some 5 us: less is not worth a thread

// Of things that have so many elements each.
int64_t grain_of(int64_t elements) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, elements));
}

// The gradient of a vector, which adds up over groups of rows. Few of them have memory at a time:
// they are added in their order, so it makes no difference how many.
class VectorSum {
 public:
  VectorSum(const Rows& grad, int64_t length, int64_t at_once) : grad_(grad), length_(length) {
    if (grad.data == nullptr) return;  // not wanted
    partials_.reset(new float[size_t(at_once * length)]);
    totals_.reset(new double[size_t(length)]);
    std::fill_n(totals_.get(), length, 0.0);
  }

  // [at_once, length]; null: not wanted.
  float* partials() const { return partials_.get(); }

  void add(Isa isa, int64_t groups, bool are_last) const {
    if (partials_ == nullptr) return;
    const Rows target = are_last ? grad_ : Rows{};
    torch::stable::parallel_for(0, length_, grain_of(groups), [&](int64_t begin, int64_t end) {
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
    of_group += grad->data != nullptr ? 1 : 0;
  }
  const int64_t of_column = norm.rows * (bytes_of(norm.x.dtype) + bytes_of(norm.grad_out.dtype));
  const int64_t fit = of_column / 128 / std::max<int64_t>(1, of_group * int64_t(sizeof(float)));
  return std::max<int64_t>(0, fit - 2);  // beside the totals, which are double
}

struct Cpu {
  static void run(const Norm& norm, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    torch::stable::parallel_for(
        0, norm.rows, grain_of(norm.length),
        [&](int64_t begin, int64_t end) { norm_cpu<DSX_NORM>(isa, norm, begin, end); });
  }

  static void run_backward_by_columns(Isa isa, const NormBackward& norm,
                                      const OfVectors<Rows>& grads) {
    const std::unique_ptr<float[]> of_rows(new float[size_t(norm.rows * kFloatsOfRow)]);
    torch::stable::parallel_for(0, norm.rows, grain_of(norm.length),
                                [&](int64_t begin, int64_t end) {
      norm_backward_rows_cpu<DSX_NORM>(isa, norm, begin, end, of_rows.get());
    });
    torch::stable::parallel_for(0, norm.length, grain_of(norm.rows),
                                [&](int64_t begin, int64_t end) {
      norm_backward_columns_cpu<DSX_NORM>(isa, norm, of_rows.get(), begin, end, grads);
    });
  }

  static void run_backward(const NormBackward& norm, const OfVectors<Rows>& grads, int /*device*/) {
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
      torch::stable::parallel_for(first, last, grain_of(norm.length * of_group),
                                  [&](int64_t begin, int64_t end) {
        norm_backward_cpu<DSX_NORM>(isa, norm, begin, end, first, partials);
      });
      for (const VectorSum* sum : {&weight, &bias, &x_bias}) {
        sum->add(isa, last - first, last == groups);
      }
      first = last;
    } while (first < groups);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) { register_norm<DSX_NORM, Cpu>(library); }

}  // namespace dsx
