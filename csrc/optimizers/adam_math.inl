// The Adam update, here and nowhere else: Float is a SIMD register on the CPU, several floats in
// CUDA. Kingma & Ba 2015, Algorithm 1; decoupled weight decay: Loshchilov & Hutter 2019, Algorithm
// 2; AMSGrad: Reddi et al. 2018, Algorithm 2. Compiled without fused multiply-add, so every device
// and every ISA gives the same bits. The branches are on constants: the same way for every element.
template <class Float>
DSX_HOST_DEVICE inline void update(const Adam::Step& step, Float grad, Float& param,
                                   Float (&states)[Adam::kStates]) {
  auto& [exp_avg, exp_avg_sq, max_exp_avg_sq] = states;
  grad = grad * Float(step.grad_factor);
  if (step.l2_penalty != 0) grad = grad + Float(step.l2_penalty) * param;
  exp_avg = Float(step.beta1) * exp_avg + Float(step.one_minus_beta1) * grad;
  exp_avg_sq = Float(step.beta2) * exp_avg_sq + Float(step.one_minus_beta2) * grad * grad;
  Float second_moment = exp_avg_sq;
  if (step.amsgrad) {
    max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq);
    second_moment = max_exp_avg_sq;
  }
  const Float root = sqrt(second_moment) * Float(step.inverse_root_bias_correction2);
  Float delta = Float(step.step_size) * exp_avg / (root + Float(step.eps));
  // One subtraction of both terms. A factor 1 - decay, rounded to float, would lose most digits of
  // a small decay, with the same sign in every step.
  if (step.decay != 0) delta = delta + Float(step.decay) * param;
  param = param - delta;
}
