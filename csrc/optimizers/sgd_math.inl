// The SGD update, here and nowhere else: Float is a SIMD register on the CPU, several floats in
// CUDA. Sutskever et al. 2013, Equations 3 and 4, in the form of torch.optim.SGD: the learning rate
// is no part of the buffer. Compiled without fused multiply-add, so every device and every ISA
// gives the same bits. The branches are on constants: the same way for every element.
template <class Float>
DSX_HOST_DEVICE inline void update(const Sgd::Step& step, Float grad, Float& param,
                                   Float (&states)[Sgd::kStates]) {
  auto& [momentum_buffer] = states;
  grad = grad * Float(step.grad_factor);
  if (step.l2_penalty != 0) grad = grad + Float(step.l2_penalty) * param;
  if (step.has_momentum) {
    momentum_buffer = step.is_first ? grad
                                    : Float(step.momentum) * momentum_buffer +
                                          Float(step.one_minus_dampening) * grad;
    grad = step.nesterov ? grad + Float(step.momentum) * momentum_buffer : momentum_buffer;
  }
  if (step.late_l2_penalty != 0) grad = grad + Float(step.late_l2_penalty) * param;
  param = param - Float(step.step_size) * grad;
}
