// The Adagrad update, here and nowhere else: Float is a SIMD register on the CPU, several floats in
// CUDA. Duchi, Hazan & Singer 2011, Figure 1 (diagonal matrices), with the eps, the learning rate
// decay and the L2 penalty of torch.optim.Adagrad. Compiled without fused multiply-add, so every
// device and every ISA gives the same bits. The branches are on constants: the same way for every
// element.
template <class Float>
DSX_HOST_DEVICE inline void update(const Adagrad::Constants& constants, Float grad, Float& param,
                                   Float (&states)[Adagrad::kStates]) {
  auto& [sum] = states;
  grad = grad * Float(constants.grad_factor);
  if (constants.l2_penalty != 0) grad = grad + Float(constants.l2_penalty) * param;
  sum = sum + grad * grad;
  param = param - Float(constants.step_size) * grad / (sqrt(sum) + Float(constants.eps));
}
