// SGD with momentum: options, constants and functions. No torch: plain pointers and numbers.
#pragma once

#include "common/math.h"
#include "common/simd/isa.h"
#include "optimizers/step.h"

namespace dsx {

struct Sgd {
  static constexpr const char* kOp = "sgd_step_";
  static constexpr int kStates = 1;  // momentum_buffer
  static constexpr int kRequiredStates = 0, kUsualStates = 1;
  DSX_HOST_DEVICE static constexpr bool is_signed(int /*state*/) { return true; }

  struct Options {
    double momentum, dampening, weight_decay;  // no momentum: momentum_buffer is absent
    bool nesterov;
    bool wd_after_momentum;  // false: weight decay goes into the buffer
  };

  struct Step {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float l2_penalty;   // weight_decay, before the momentum
    float momentum;
    float one_minus_dampening;
    float late_l2_penalty;  // weight_decay, after the momentum
    float step_size;        // lr
    bool has_momentum;
    bool is_first;  // begins the buffer with the gradient
    bool nesterov;
  };

  DSX_HOST_DEVICE static Step make_step(const Options& options, double lr, double grad_divisor,
                                        float step) {
    return {
        .grad_factor = float(1 / grad_divisor),
        .l2_penalty = float(options.wd_after_momentum ? 0 : options.weight_decay),
        .momentum = float(options.momentum),
        .one_minus_dampening = float(1 - options.dampening),
        .late_l2_penalty = float(options.wd_after_momentum ? options.weight_decay : 0),
        .step_size = float(lr),
        .has_momentum = options.momentum != 0,
        .is_first = step <= 1,
        .nesterov = options.nesterov,
    };
  }
};

// Updates elements [begin, end) of the row that the tensors form (common/chunks.h), whose steps
// have been advanced; found_inf is not looked at. Disjoint ranges may run on different threads; the
// result does not depend on how the row is cut. Never throws.
void step_cpu(Isa isa, const StepCall<Sgd>& call, const StepTensor<Sgd::kStates>* tensors,
              const int64_t* tensor_begin,  // [count + 1]
              int64_t count, int64_t begin, int64_t end);

// Queues the step of all tensors on the stream, on the current device: advances their steps and
// updates them, unless found_inf says skip. Throws if a launch fails.
void step_cuda(const StepCall<Sgd>& call,
               const StepTensor<Sgd::kStates>* tensors,  // [count] host memory
               int64_t count,
               Prepared<Sgd>* prepared,  // [count] device memory to work in
               void* stream);

}  // namespace dsx
