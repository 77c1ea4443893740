// The formulas of cross entropy, for a SIMD register or for floats in CUDA. Label smoothing:
// Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016, section 7.
// z-loss: Chowdhery et al., "PaLM", 2022, section 5.

// ln of the sum of e^logit.
template <class V>
DSX_HOST_DEVICE inline V log_sum_exp(const V& largest, const V& sum) {
  return largest + log(sum);
}

// What label smoothing takes from the target for each of n classes.
DSX_HOST_DEVICE inline float share_of_class(float label_smoothing, int64_t n) {
  return label_smoothing / float(n);
}

// What one class adds to the loss by label smoothing. A sum of logits would lose the digits in
// which they differ, or be too large.
template <class V>
DSX_HOST_DEVICE inline V smoothing_of_class(const V& largest, const V& logit, const V& share) {
  return share * (largest - logit);
}

// Of one row. Logits are taken from the largest one first: a loss is often small beside both.
// `smoothing` is the sum over the classes.
template <class V>
DSX_HOST_DEVICE inline V loss_of_row(const V& largest, const V& sum, const V& of_target,
                                     const V& smoothing, float label_smoothing, float z_loss) {
  V loss = log(sum) + V(1.0f - label_smoothing) * (largest - of_target);
  if (label_smoothing > 0) loss = loss + smoothing;
  if (z_loss > 0) {
    const V whole = log_sum_exp(largest, sum);
    loss = loss + V(z_loss) * whole * whole;
  }
  return loss;
}

// By how much z-loss makes the gradient through the sum larger.
template <class V>
DSX_HOST_DEVICE inline V boost_of_row(const V& largest, const V& sum, float z_loss) {
  if (!(z_loss > 0)) return V(1.0f);
  return V(1.0f) + V(2.0f * z_loss) * log_sum_exp(largest, sum);
}

// `share` is what label smoothing takes from the gradient of each logit, `hit` what the target
// does.
template <class V>
DSX_HOST_DEVICE inline V grad_of_logit(const V& probability, const V& boost, const V& share,
                                       const V& hit, const V& factor) {
  return (probability * boost - share - hit) * factor;
}
