// LAMB, in two passes over memory: options, constants and functions. No torch: plain pointers and
// numbers.
#pragma once

#include <cmath>

#include "common/math.h"
#include "common/power.h"
#include "common/simd/isa.h"
#include "optimizers/step.h"

namespace dsx {

// Lamb<Pass::prepare> brings the moments up to date and adds up the squares of each tensor and of
// its update; Lamb<Pass::apply> subtracts the update, at a rate for each tensor.
template <Pass pass>
struct Lamb {
  static constexpr Pass kPass = pass;
  static constexpr const char* kOp = pass == Pass::apply ? "lamb_apply_" : "lamb_moments_";
  static constexpr int kStates = 2, kRequiredStates = 2, kUsualStates = 2;  // exp_avg, exp_avg_sq
  DSX_HOST_DEVICE static constexpr bool is_signed(int state) { return state == 0; }

  struct Options {
    double beta1, beta2, eps, weight_decay;
    bool eps_inside_sqrt;
    bool bias_correction;  // false: the running means are taken as they are
  };

  struct Step {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float inverse_bias_correction1;       // 1 / (1 - beta1^step)
    float inverse_bias_correction2;       // 1 / (1 - beta2^step)
    float inverse_root_bias_correction2;  // its root
    float eps;
    float weight_decay;
    float step_size;  // lr times the coefficient of the tensor
    bool eps_inside_sqrt;
  };

  DSX_HOST_DEVICE static Step make_step(const Options& options, double lr, double grad_divisor,
                                        float step) {
    const bool correct = options.bias_correction;
    const double bias_correction1 = correct ? 1 - power(options.beta1, int64_t(step)) : 1;
    const double bias_correction2 = correct ? 1 - power(options.beta2, int64_t(step)) : 1;
    return {
        .grad_factor = float(1 / grad_divisor),
        .beta1 = float(options.beta1),
        .one_minus_beta1 = float(1 - options.beta1),
        .beta2 = float(options.beta2),
        .one_minus_beta2 = float(1 - options.beta2),
        .inverse_bias_correction1 = float(1 / bias_correction1),
        .inverse_bias_correction2 = float(1 / bias_correction2),
        .inverse_root_bias_correction2 = float(1 / std::sqrt(bias_correction2)),
        .eps = float(options.eps),
        .weight_decay = float(options.weight_decay),
        .step_size = float(lr),
        .eps_inside_sqrt = options.eps_inside_sqrt,
    };
  }
};

using LambMoments = Lamb<Pass::prepare>;
using LambApply = Lamb<Pass::apply>;
using LambTensor = StepTensor<LambApply::kStates>;

// Both do elements [begin, end) of the row that the tensors form (common/chunks.h), whose steps
// have been advanced; found_inf is not looked at. Disjoint ranges may run on different threads; the
// result does not depend on how the row is cut. Never throw. The first one writes for each chunk of
// kReductionChunk elements the sums of squares of param and update.
void measure_cpu(Isa isa, const StepCall<LambMoments>& call, const LambTensor* tensors,
                 const int64_t* tensor_begin,  // [count + 1]
                 const int64_t* first_chunk,   // [count + 1] of each tensor, then the end
                 int64_t count, int64_t begin, int64_t end,
                 double* squares);  // [first_chunk[count], kMeasured]
void step_cpu(Isa isa, const StepCall<LambApply>& call, const LambTensor* tensors,
              const int64_t* tensor_begin, int64_t count, int64_t begin, int64_t end);

// Both queue the work on all tensors on the stream, on the current device. If found_inf says skip,
// nothing is modified but the squares, which are 0 then. Throw if a launch fails. The first one
// advances the steps.
void measure_cuda(const StepCall<LambMoments>& call,
                  const LambTensor* tensors,  // [count] host memory
                  int64_t count,
                  Prepared<LambMoments>* prepared,  // [count] device memory to work in
                  double* workspace,                // [doubles_to_measure()] the same
                  double* squares,                  // [count, kMeasured] device memory, written
                  void* stream);
int64_t doubles_to_measure(const LambTensor* tensors, int64_t count);
void step_cuda(const StepCall<LambApply>& call, const LambTensor* tensors, int64_t count,
               Prepared<LambApply>* prepared, void* stream);

}  // namespace dsx
