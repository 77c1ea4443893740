// LARS, in two passes over memory: options, constants and functions. No torch: plain pointers and
// numbers.
#pragma once

#include "common/math.h"
#include "common/simd/isa.h"
#include "optimizers/step.h"

namespace dsx {

struct LarsState {
  static constexpr int kStates = 1;  // momentum_buffer
  static constexpr int kRequiredStates = 0, kUsualStates = 1;
  DSX_HOST_DEVICE static constexpr bool is_signed(int /*state*/) { return true; }
};

struct LarsNorms : LarsState {  // of each tensor and its gradient; has no state
  static constexpr Pass kPass = Pass::measure;
  static constexpr const char* kOp = "lars_norms";

  struct Options {};

  struct Step {
    float grad_factor;  // 1 / grad_scale
  };

  DSX_HOST_DEVICE static Step make_step(const Options& /*options*/, double /*lr*/,
                                        double grad_divisor, float /*step*/) {
    return {float(1 / grad_divisor)};
  }
};

struct LarsApply : LarsState {
  static constexpr Pass kPass = Pass::step;
  static constexpr const char* kOp = "lars_apply_";

  struct Options {
    double momentum, weight_decay;
  };

  struct Step {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float weight_decay;
    float momentum;
    float step_size;  // lr times the coefficient of the tensor
  };

  DSX_HOST_DEVICE static Step make_step(const Options& options, double lr, double grad_divisor,
                                        float /*step*/) {
    return {
        .grad_factor = float(1 / grad_divisor),
        .weight_decay = float(options.weight_decay),
        .momentum = float(options.momentum),
        .step_size = float(lr),
    };
  }
};

using LarsTensor = StepTensor<LarsState::kStates>;

// Both do elements [begin, end) of the row that the tensors form (common/chunks.h), whose steps
// have been advanced; found_inf is not looked at. Disjoint ranges may run on different threads; the
// result does not depend on how the row is cut. Never throw. The first one writes for each chunk of
// kReductionChunk elements the sums of squares of param and gradient.
void measure_cpu(Isa isa, const StepCall<LarsNorms>& call, const LarsTensor* tensors,
                 const int64_t* tensor_begin,  // [count + 1]
                 const int64_t* first_chunk,   // [count + 1] of each tensor, then the end
                 int64_t count, int64_t begin, int64_t end,
                 double* squares);  // [first_chunk[count], kMeasured]
void step_cpu(Isa isa, const StepCall<LarsApply>& call, const LarsTensor* tensors,
              const int64_t* tensor_begin, int64_t count, int64_t begin, int64_t end);

// Both queue the work on all tensors on the stream, on the current device. Throw if a launch fails.
// The second one advances the steps; it does nothing if found_inf says skip.
void measure_cuda(const StepCall<LarsNorms>& call,
                  const LarsTensor* tensors,  // [count] host memory
                  int64_t count,
                  Prepared<LarsNorms>* prepared,  // [count] device memory to work in
                  double* workspace,              // [doubles_to_measure()] the same
                  double* squares,                // [count, kMeasured] device memory, written
                  void* stream);
int64_t doubles_to_measure(const LarsTensor* tensors, int64_t count);
void step_cuda(const StepCall<LarsApply>& call, const LarsTensor* tensors, int64_t count,
               Prepared<LarsApply>* prepared, void* stream);

}  // namespace dsx
