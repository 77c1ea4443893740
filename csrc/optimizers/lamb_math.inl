// The LAMB update, here and nowhere else: Float is a SIMD register on the CPU, floats of a thread
// in CUDA. You et al. 2020, "Large Batch Optimization for Deep Learning", Algorithm 2. Compiled
// without fused multiply-add, so every device and every ISA gives the same bits. The branches are
// on constants: the same way for every element.
template <class Constants, class Float>
DSX_HOST_DEVICE inline Float lamb_update(const Constants& constants, Float param, Float exp_avg,
                                         Float exp_avg_sq) {
  Float denominator;
  if (constants.eps_inside_sqrt) {
    denominator =
        sqrt(exp_avg_sq * Float(constants.inverse_bias_correction2) + Float(constants.eps));
  } else {
    denominator =
        sqrt(exp_avg_sq) * Float(constants.inverse_root_bias_correction2) + Float(constants.eps);
  }
  Float update = exp_avg * Float(constants.inverse_bias_correction1) / denominator;
  if (constants.weight_decay != 0) update = update + Float(constants.weight_decay) * param;
  return update;
}

template <class Float>
DSX_HOST_DEVICE inline void update(const LambMoments::Constants& constants, Float grad,
                                   Float& /*param*/, Float (&states)[LambMoments::kStates]) {
  auto& [exp_avg, exp_avg_sq] = states;
  grad = grad * Float(constants.grad_factor);
  exp_avg = Float(constants.beta1) * exp_avg + Float(constants.one_minus_beta1) * grad;
  exp_avg_sq = Float(constants.beta2) * exp_avg_sq + Float(constants.one_minus_beta2) * grad * grad;
}

template <class Float>
DSX_HOST_DEVICE inline void measure(const LambMoments::Constants& constants, Float /*grad*/,
                                    Float param, const Float (&states)[LambMoments::kStates],
                                    Float (&values)[kMeasured]) {
  values[0] = param;
  values[1] = lamb_update(constants, param, states[0], states[1]);
}

template <class Float>
DSX_HOST_DEVICE inline void update(const LambApply::Constants& constants, Float /*grad*/,
                                   Float& param, Float (&states)[LambApply::kStates]) {
  param = param - Float(constants.step_size) * lamb_update(constants, param, states[0], states[1]);
}
