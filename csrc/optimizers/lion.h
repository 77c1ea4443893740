// Lion: options, constants and functions. No torch: plain pointers and numbers.
#pragma once

#include "common/math.h"
#include "common/simd/isa.h"
#include "optimizers/step.h"

namespace dsx {

struct Lion {
  static constexpr const char* kOp = "lion_step_";
  static constexpr int kStates = 1;  // exp_avg
  static constexpr int kRequiredStates = 1, kUsualStates = 1;
  DSX_HOST_DEVICE static constexpr bool is_signed(int /*state*/) { return true; }

  struct Options {
    double beta1, beta2, weight_decay;
  };

  struct Step {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float step_size;  // lr
    float decay;      // lr * weight_decay
  };

  DSX_HOST_DEVICE static Step make_step(const Options& options, double lr, double grad_divisor,
                                        float /*step*/) {
    return {
        .grad_factor = float(1 / grad_divisor),
        .beta1 = float(options.beta1),
        .one_minus_beta1 = float(1 - options.beta1),
        .beta2 = float(options.beta2),
        .one_minus_beta2 = float(1 - options.beta2),
        .step_size = float(lr),
        .decay = float(lr * options.weight_decay),
    };
  }
};

// Updates elements [begin, end) of the row that the tensors form (common/chunks.h), whose steps
// have been advanced; found_inf is not looked at. Disjoint ranges may run on different threads; the
// result does not depend on how the row is cut. Never throws.
void step_cpu(Isa isa, const StepCall<Lion>& call, const StepTensor<Lion::kStates>* tensors,
              const int64_t* tensor_begin,  // [count + 1]
              int64_t count, int64_t begin, int64_t end);

// Queues the step of all tensors on the stream, on the current device: advances their steps and
// updates them, unless found_inf says skip. Throws if a launch fails.
void step_cuda(const StepCall<Lion>& call,
               const StepTensor<Lion::kStates>* tensors,  // [count] host memory
               int64_t count,
               Prepared<Lion>* prepared,  // [count] device memory to work in
               void* stream);

}  // namespace dsx
