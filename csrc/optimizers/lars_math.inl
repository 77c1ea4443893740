// The LARS update, here and nowhere else: Float is a SIMD register on the CPU, floats of a thread
// in CUDA. You, Gitman & Ginsburg 2017, "Large Batch Training of Convolutional Networks",
// Algorithm 1. Compiled without fused multiply-add, so every device and every ISA gives the same
// bits. The branches are on constants: the same way for every element.
template <class Float>
DSX_HOST_DEVICE inline void update(const LarsNorms::Constants& /*constants*/, Float /*grad*/,
                                   Float& /*param*/, Float (& /*states*/)[LarsNorms::kStates]) {}

template <class Float>
DSX_HOST_DEVICE inline void measure(const LarsNorms::Constants& constants, Float grad, Float param,
                                    const Float (& /*states*/)[LarsNorms::kStates],
                                    Float (&values)[kMeasured]) {
  values[0] = param;
  values[1] = grad * Float(constants.grad_factor);
}

template <class Float>
DSX_HOST_DEVICE inline void update(const LarsApply::Constants& constants, Float grad, Float& param,
                                   Float (&states)[LarsApply::kStates]) {
  grad = grad * Float(constants.grad_factor);
  if (constants.weight_decay != 0) grad = grad + Float(constants.weight_decay) * param;
  Float delta = Float(constants.step_size) * grad;
  if (constants.momentum != 0) delta = Float(constants.momentum) * states[0] + delta;
  states[0] = delta;
  param = param - delta;
}
