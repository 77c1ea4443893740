// Adagrad: options, constants and functions. No torch: plain pointers and numbers.
#pragma once

#include <cmath>

#include "common/math.h"
#include "common/simd/isa.h"
#include "optimizers/step.h"

namespace dsx {

struct Adagrad {
  static constexpr const char* kOp = "adagrad_step_";
  static constexpr int kStates = 1;  // sum
  static constexpr int kRequiredStates = 1, kUsualStates = 1;
  DSX_HOST_DEVICE static constexpr bool is_signed(int /*state*/) { return false; }

  struct Options {
    double lr_decay, eps, weight_decay;
  };

  struct Step {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float l2_penalty;   // weight_decay
    float eps;
    float step_size;  // lr / (1 + (step - 1) * lr_decay)
  };

  DSX_HOST_DEVICE static Step make_step(const Options& options, double lr, double grad_divisor,
                                        float step) {
    return {
        .grad_factor = float(1 / grad_divisor),
        .l2_penalty = float(options.weight_decay),
        .eps = float(options.eps),
        .step_size = float(lr / (1 + (double(step) - 1) * options.lr_decay)),
    };
  }
};

// Updates elements [begin, end) of the row that the tensors form (common/chunks.h), whose steps
// have been advanced; found_inf is not looked at. Disjoint ranges may run on different threads; the
// result does not depend on how the row is cut. Never throws.
void step_cpu(Isa isa, const StepCall<Adagrad>& call, const StepTensor<Adagrad::kStates>* tensors,
              const int64_t* tensor_begin,  // [count + 1]
              int64_t count, int64_t begin, int64_t end);

// Queues the step of all tensors on the stream, on the current device: advances their steps and
// updates them, unless found_inf says skip. Throws if a launch fails.
void step_cuda(const StepCall<Adagrad>& call,
               const StepTensor<Adagrad::kStates>* tensors,  // [count] host memory
               int64_t count,
               Prepared<Adagrad>* prepared,  // [count] device memory to work in
               void* stream);

}  // namespace dsx
