// The SGD update, here and nowhere else: Float is a SIMD register on the CPU, several floats in
// CUDA. Sutskever et al. 2013, Equations 3 and 4, in the form of torch.optim.SGD: the learning rate
// is no part of the buffer. Compiled without fused multiply-add, so every device and every ISA
// gives the same bits. The branches are on constants: the same way for every element.
template <class Float>
DSX_HOST_DEVICE inline void update(const Sgd::Constants& constants, Float grad, Float& param,
                                   Float (&states)[Sgd::kStates]) {
  auto& [momentum_buffer] = states;
  grad = grad * Float(constants.grad_factor);
  if (constants.l2_penalty != 0) grad = grad + Float(constants.l2_penalty) * param;
  if (constants.has_momentum) {
    momentum_buffer = constants.is_first ? grad
                                         : Float(constants.momentum) * momentum_buffer +
                                               Float(constants.one_minus_dampening) * grad;
    grad =
        constants.nesterov ? grad + Float(constants.momentum) * momentum_buffer : momentum_buffer;
  }
  if (constants.late_l2_penalty != 0) grad = grad + Float(constants.late_l2_penalty) * param;
  param = param - Float(constants.step_size) * grad;
}
