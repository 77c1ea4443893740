// The LAMB update, here and nowhere else: Float is a SIMD register on the CPU, floats of a thread
// in CUDA. You et al. 2020, "Large Batch Optimization for Deep Learning", Algorithm 2. Compiled
// without fused multiply-add, so every device and every ISA gives the same bits. The branches are
// on constants: the same way for every element.
template <class Step, class Float>
DSX_HOST_DEVICE inline Float lamb_update(const Step& step, Float param, Float exp_avg,
                                         Float exp_avg_sq) {
  Float denominator;
  if (step.eps_inside_sqrt) {
    denominator = sqrt(exp_avg_sq * Float(step.inverse_bias_correction2) + Float(step.eps));
  } else {
    denominator = sqrt(exp_avg_sq) * Float(step.inverse_root_bias_correction2) + Float(step.eps);
  }
  Float update = exp_avg * Float(step.inverse_bias_correction1) / denominator;
  if (step.weight_decay != 0) update = update + Float(step.weight_decay) * param;
  return update;
}

template <class Float>
DSX_HOST_DEVICE inline void update(const LambMoments::Step& step, Float grad, Float& /*param*/,
                                   Float (&states)[LambMoments::kStates]) {
  auto& [exp_avg, exp_avg_sq] = states;
  grad = grad * Float(step.grad_factor);
  exp_avg = Float(step.beta1) * exp_avg + Float(step.one_minus_beta1) * grad;
  exp_avg_sq = Float(step.beta2) * exp_avg_sq + Float(step.one_minus_beta2) * grad * grad;
}

template <class Float>
DSX_HOST_DEVICE inline void measure(const LambMoments::Step& step, Float /*grad*/, Float param,
                                    const Float (&states)[LambMoments::kStates],
                                    Float (&values)[kMeasured]) {
  values[0] = param;
  values[1] = lamb_update(step, param, states[0], states[1]);
}

template <class Float>
DSX_HOST_DEVICE inline void update(const LambApply::Step& step, Float /*grad*/, Float& param,
                                   Float (&states)[LambApply::kStates]) {
  param = param - Float(step.step_size) * lamb_update(step, param, states[0], states[1]);
}
