// The Adam update, here and nowhere else: Float is a SIMD register on the CPU, several floats in
// CUDA. Kingma & Ba 2015, Algorithm 1; decoupled weight decay: Loshchilov & Hutter 2019, Algorithm
// 2; AMSGrad: Reddi et al. 2018, Algorithm 2. Compiled without fused multiply-add, so every device
// and every ISA gives the same bits. The branches are on constants: the same way for every element.
template <class Float>
DSX_HOST_DEVICE inline void update(const Adam::Constants& constants, Float grad, Float& param,
                                   Float (&states)[Adam::kStates]) {
  auto& [exp_avg, exp_avg_sq, max_exp_avg_sq] = states;
  grad = grad * Float(constants.grad_factor);
  if (constants.has_l2_penalty) grad = grad + Float(constants.l2_penalty) * param;
  exp_avg = Float(constants.beta1) * exp_avg + Float(constants.one_minus_beta1) * grad;
  exp_avg_sq = Float(constants.beta2) * exp_avg_sq + Float(constants.one_minus_beta2) * grad * grad;
  Float second_moment = exp_avg_sq;
  if (constants.amsgrad) {
    max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq);
    second_moment = max_exp_avg_sq;
  }
  const Float root = sqrt(second_moment) * Float(constants.inverse_root_bias_correction2);
  Float delta = Float(constants.step_size) * exp_avg / (root + Float(constants.eps));
  // One subtraction of both terms. A factor 1 - decay, rounded to float, would lose most digits of
  // a small decay, with the same sign in every step.
  if (constants.has_decay) delta = delta + Float(constants.decay) * param;
  param = param - delta;
}
