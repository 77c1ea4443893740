// The formulas of softmax, for a SIMD register or for floats in CUDA. The row's largest score is
// taken from each first, so that nothing overflows. ALiBi: Press, Smith & Lewis, "Train Short, Test
// Long", 2022, section 3. Soft cap: Bello et al., "Neural Combinatorial Optimization with
// Reinforcement Learning", 2017, equation 16 of its appendix.

// What to take from the scores of a row whose largest one this is: nothing if none takes part.
template <class V>
DSX_HOST_DEVICE inline V shift_of(const V& largest) {
  return select(largest == V(-INFINITY), V(0.0f), largest);
}

// 1 / the sum over a row of e^(score - shift): 0 if none takes part.
template <class V>
DSX_HOST_DEVICE inline V inverse_of(const V& sum) {
  return select(sum == V(0.0f), V(0.0f), V(1.0f) / sum);
}

// cap * tanh(score / cap), off by a few units in the last place.
template <class V>
DSX_HOST_DEVICE inline V capped(const V& score, float cap) {
  return scaled_tanh(score, score * V(1.0f / cap), cap);
}

// The derivative of that: 1 - tanh^2, as 1 / cosh^2, in which nothing cancels.
template <class V>
DSX_HOST_DEVICE inline V slope_under_cap(const V& score, float cap) {
  const V decay = exp(abs(score) * V(-2.0f / cap)), sum = V(1.0f) + decay;
  return V(4.0f) * decay / (sum * sum);
}

template <class V, class Slope>
DSX_HOST_DEVICE inline V biased(const V& score, const V& distance, const Slope& slope) {
  return score - V(slope) * distance;
}

// A mask of -inf leaves out, whatever the score is.
template <class V>
DSX_HOST_DEVICE inline V with_mask_added(const V& score, const V& mask) {
  return select(mask == V(-INFINITY), mask, score + mask);
}

// What an element adds to the dot product of a row's results and their gradients; where the result
// is 0, so is the gradient, whatever came back.
template <class V>
DSX_HOST_DEVICE inline V grad_term(const V& out, const V& grad_out) {
  return select(out == V(0.0f), V(0.0f), out * grad_out);
}

template <class V>
DSX_HOST_DEVICE inline V grad_of_score(const V& out, const V& grad_out, const V& dot) {
  return select(out == V(0.0f), V(0.0f), out * (grad_out - dot));
}
