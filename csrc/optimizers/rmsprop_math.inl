// The RMSprop update, here and nowhere else: Float is a SIMD register on the CPU, several floats in
// CUDA. Tieleman & Hinton 2012, lecture 6.5; centered: Graves 2013, equations 38 to 45; in the form
// of torch.optim.RMSprop. Compiled without fused multiply-add, so every device and every ISA gives
// the same bits. The branches are on constants: the same way for every element.
template <class Float>
DSX_HOST_DEVICE inline void update(const Rmsprop::Constants& constants, Float grad, Float& param,
                                   Float (&states)[Rmsprop::kStates]) {
  auto& [square_avg, grad_avg, momentum_buffer] = states;
  grad = grad * Float(constants.grad_factor);
  if (constants.l2_penalty != 0) grad = grad + Float(constants.l2_penalty) * param;
  const Float alpha(constants.alpha), one_minus_alpha(constants.one_minus_alpha);
  square_avg = alpha * square_avg + one_minus_alpha * grad * grad;
  Float variance = square_avg;
  if (constants.centered) {
    grad_avg = alpha * grad_avg + one_minus_alpha * grad;
    // What is less than float can tell from 0 counts as that: the difference may be below 0.
    variance = max(square_avg - grad_avg * grad_avg, Float(0x1p-22f) * square_avg);
  }
  Float delta = grad / (sqrt(variance) + Float(constants.eps));
  if (constants.has_momentum) {
    momentum_buffer = Float(constants.momentum) * momentum_buffer + delta;
    delta = momentum_buffer;
  }
  param = param - Float(constants.step_size) * delta;
}
