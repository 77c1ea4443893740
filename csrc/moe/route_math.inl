// The formulas of routing, for a SIMD register or for floats in CUDA.

// What to take from logits whose largest one this is: nothing if none is above -inf.
template <class V>
DSX_HOST_DEVICE inline V shift_of_logits(const V& largest) {
  return select(largest == V(-INFINITY), V(0.0f), largest);
}

// The gradient of a logit by its probability, and the dot product of both over all experts.
template <class V>
DSX_HOST_DEVICE inline V grad_through_softmax(const V& p, const V& grad, const V& dot) {
  return p * (grad - dot);
}

// The same by its sigmoid s: 1 - s is the sigmoid of the opposite, in which nothing cancels.
template <class V>
DSX_HOST_DEVICE inline V grad_through_sigmoid(const V& logit, const V& s, const V& grad) {
  return grad * (s * sigmoid(-logit));
}
