// The Lion update, here and nowhere else: Float is a SIMD register on the CPU, several floats in
// CUDA. Chen et al. 2023, Algorithm 2. Compiled without fused multiply-add, so every device and
// every ISA gives the same bits. The branches are on constants: the same way for every element.
template <class Float>
DSX_HOST_DEVICE inline void update(const Lion::Constants& constants, Float grad, Float& param,
                                   Float (&states)[Lion::kStates]) {
  auto& [exp_avg] = states;
  grad = grad * Float(constants.grad_factor);
  const Float direction =
      Float(constants.beta1) * exp_avg + Float(constants.one_minus_beta1) * grad;
  const Float zero(0.0f), one(1.0f);
  // Of 0 and NaN the sign is itself.
  const Float sign =
      select(direction > zero, one, select(direction < zero, Float(-1.0f), direction));
  Float delta = Float(constants.step_size) * sign;
  if (constants.decay != 0) delta = delta + Float(constants.decay) * param;  // see adam_math.inl
  param = param - delta;
  exp_avg = Float(constants.beta2) * exp_avg + Float(constants.one_minus_beta2) * grad;
}
