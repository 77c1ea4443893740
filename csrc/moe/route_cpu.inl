// The loops of routing over one token. Logits are few, and read once.
#include "common/simd/row_sums.inl"
#include "common/simd/largest.inl"
#include "moe/route_math.inl"

// What is known of all experts for a token.
struct ExpertScores {
  float logits[kMostExperts], probabilities[kMostExperts];
  float sigmoids[kMostExperts];  // with Score::sigmoid
  float log_of_sum, sum_of_sigmoids;

  ExpertScores(const RouteOptions& options, const Pointer<Any>& row) {
    const int64_t n = options.experts;
    Largest largest;
    for_each_vector(0, n, [&](int64_t i, int count) {
      const Vec logit = Vec::load(row + i, count);
      logit.store(logits + i, count);
      largest.take(first_lanes(logit, count), i);
    });
    const Vec shift = shift_of_logits(Vec(largest.of_all()));
    float sum[1];
    add_row(n, sum, [&](int64_t i, int count, Vec(&terms)[1]) {
      const Vec power = exp_of_negative(Vec::load(logits + i, count) - shift);
      power.store(probabilities + i, count);
      terms[0] = first_lanes(power, count, 0.0f);
    });
    (shift + log(Vec(sum[0]))).store(&log_of_sum, 1);
    const Vec inverse = Vec(1.0f) / Vec(sum[0]);
    for_each_vector(0, n, [&](int64_t i, int count) {
      (Vec::load(probabilities + i, count) * inverse).store(probabilities + i, count);
    });
    if (options.score == Score::sigmoid) read_sigmoids(n);
  }

  void read_sigmoids(int64_t n) {
    float sum[1];
    add_row(n, sum, [&](int64_t i, int count, Vec(&terms)[1]) {
      const Vec value = sigmoid(Vec::load(logits + i, count));
      value.store(sigmoids + i, count);
      terms[0] = first_lanes(value, count, 0.0f);
    });
    sum_of_sigmoids = sum[0] + kLeastSum;
  }

  // What weights are before they are normalized, or the logits of those that are powers.
  const float* of(Score score) const {
    return score == Score::softmax ? probabilities : score == Score::sigmoid ? sigmoids : logits;
  }
};

// Where the largest `count` of n numbers are for which is_in(i), the largest one first.
template <class IsIn>
inline void find_largest(const float* values, int64_t n, int64_t count, const IsIn& is_in,
                         int64_t* places) {
  uint64_t best[kMostExperts];  // of equal numbers the first has the larger key
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t key = uint64_t(rank_of(values[i])) << 32 | uint32_t(~i);
    if (!is_in(i) || (found == count && key < best[count - 1])) continue;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && best[at - 1] < key; --at) best[at] = best[at - 1];
    best[at] = key;
  }
  for (int64_t j = 0; j < count; ++j) places[j] = int64_t(uint32_t(~best[j]));
}

// Which groups a token chooses from.
inline void choose_groups(const Route& call, const float* values, bool* is_chosen) {
  const int64_t length = call.options.experts / call.groups;
  const int64_t best = call.options.score == Score::sigmoid && length > 1 ? 2 : 1;
  const auto all = [](int64_t) { return true; };
  float of_groups[kMostExperts];
  int64_t places[kMostExperts];
  for (int64_t g = 0; g < call.groups; ++g) {
    const float* of_group = values + g * length;
    find_largest(of_group, length, best, all, places);
    of_groups[g] = of_group[places[0]];
    if (best > 1) of_groups[g] += of_group[places[1]];
    is_chosen[g] = false;
  }
  find_largest(of_groups, call.groups, call.topk_groups, all, places);
  for (int64_t g = 0; g < call.topk_groups; ++g) is_chosen[places[g]] = true;
}

inline void choose_experts(const Route& call, const ExpertScores& scores, int64_t* chosen) {
  const int64_t n = call.options.experts, k = call.options.k;
  float biased[kMostExperts];
  const float* values = scores.logits;  // in the same order as their probabilities, or sigmoids
  const float* of_groups = call.options.score == Score::sigmoid ? scores.sigmoids : values;
  if (call.bias.is_present()) {
    const Pointer<Any> bias = call.bias.row<Any>(0);
    const float* unbiased = scores.of(call.options.score);
    for_each_vector(0, n, [&](int64_t i, int count) {
      (Vec::load(unbiased + i, count) + Vec::load(bias + i, count)).store(biased + i, count);
    });
    values = of_groups = biased;
  }
  if (call.groups == 1) return find_largest(values, n, k, [](int64_t) { return true; }, chosen);
  bool is_chosen[kMostExperts];
  choose_groups(call, of_groups, is_chosen);
  const int64_t length = n / call.groups;
  find_largest(values, n, k, [&](int64_t i) { return is_chosen[i / length]; }, chosen);
}

// e^(value - the largest of them), one after the other.
inline void to_powers(float* values, int64_t n) {
  float largest = -INFINITY;
  for (int64_t j = 0; j < n; ++j) largest = largest < values[j] ? values[j] : largest;
  const Vec shift = shift_of_logits(Vec(largest));
  for_each_vector(0, n, [&](int64_t j, int count) {
    exp_of_negative(Vec::load(values + j, count) - shift).store(values + j, count);
  });
}

// The weights of a token's choices before they are normalized. Returns their sum.
inline float unscaled_weights(const RouteOptions& options, const ExpertScores& scores,
                              const int64_t* chosen, float* weights) {
  const float* values = scores.of(options.score);
  for (int64_t j = 0; j < options.k; ++j) weights[j] = values[chosen[j]];
  if (options.score == Score::softmax_topk) to_powers(weights, options.k);
  float sum = 0;
  for (int64_t j = 0; j < options.k; ++j) sum += weights[j];
  return sum;
}

inline void route_token(const Route& call, int64_t token, float* sums) {
  const RouteOptions& options = call.options;
  const int64_t n = options.experts, k = options.k;
  const ExpertScores scores(options, call.logits.row<Any>(token));
  int64_t* chosen = call.chosen + token * k;
  float* weights = call.weights + token * k;
  choose_experts(call, scores, chosen);
  const float factor =
      factor_of_weights(options, unscaled_weights(options, scores, chosen, weights));
  for (int64_t j = 0; j < k; ++j) weights[j] *= factor;
  const bool is_sigmoid = options.score == Score::sigmoid;
  const float* terms = is_sigmoid ? scores.sigmoids : scores.probabilities;
  const Vec divisor(is_sigmoid ? scores.sum_of_sigmoids : 1.0f);
  for_each_vector(0, n, [&](int64_t i, int count) {
    const Vec term = Vec::load(terms + i, count) / divisor;
    (Vec::load(sums + i, count) + term).store(sums + i, count);
  });
  sums[n] += scores.log_of_sum * scores.log_of_sum;
}

inline void route_tiles(const Route& call, int64_t begin, int64_t end) {
  const int64_t of_tile = tokens_of_tile(call.options.tokens);
  const int64_t columns = call.options.experts + 1;
  for (int64_t tile = begin; tile < end; ++tile) {
    float* sums = call.partials + tile * columns;
    for (int64_t i = 0; i < columns; ++i) sums[i] = 0;
    const int64_t last = std::min(call.options.tokens, (tile + 1) * of_tile);
    for (int64_t token = tile * of_tile; token < last; ++token) route_token(call, token, sums);
  }
}

// Adds what comes back through the weights to the gradients of `target`, which are those of scores,
// or of logits with Score::softmax_topk.
inline void add_grad_of_weights(const RouteBackward& call, const ExpertScores& scores,
                                int64_t token, float* target) {
  const RouteOptions& options = call.options;
  const int64_t* chosen = call.chosen + token * options.k;
  const float* grad = call.grad_weights + token * options.k;
  float weights[kMostExperts];
  const float sum = unscaled_weights(options, scores, chosen, weights);
  const bool are_powers = options.score == Score::softmax_topk;
  float dot = 0;
  for (int64_t j = 0; j < options.k; ++j) {
    if (are_powers) weights[j] /= sum;
    dot += weights[j] * grad[j];
  }
  const WeightGradients gradients(options, sum, dot);
  for (int64_t j = 0; j < options.k; ++j) {
    target[chosen[j]] += gradients.of(grad[j]) * (are_powers ? weights[j] : 1.0f);
  }
}

// The dot product over all experts.
inline float dot_of(const float* a, const float* b, int64_t n) {
  float dot[1];
  add_row(n, dot, [&](int64_t i, int count, Vec(&terms)[1]) {
    terms[0] = Vec::load(a + i, count) * Vec::load(b + i, count);  // beyond `count`: 0
  });
  return dot[0];
}

inline void route_backward_token(const RouteBackward& call, int64_t token) {
  const RouteOptions& options = call.options;
  const int64_t n = options.experts;
  const ExpertScores scores(options, call.logits.row<Any>(token));
  const bool has_sums = call.grad_probability_sums != nullptr;
  const bool is_sigmoid = options.score == Score::sigmoid;
  float grads[kMostExperts], of_logits[kMostExperts];  // of scores; of logits besides
  for (int64_t i = 0; i < n; ++i) {
    grads[i] = has_sums ? call.grad_probability_sums[i] : 0.0f;
    of_logits[i] = 0;
  }
  if (is_sigmoid && has_sums) {  // probabilities are sigmoids by their sum
    const Vec divisor(scores.sum_of_sigmoids);
    const Vec dot = Vec(dot_of(scores.sigmoids, grads, n)) / divisor;
    for_each_vector(0, n, [&](int64_t i, int count) {
      ((Vec::load(grads + i, count) - dot) / divisor).store(grads + i, count);
    });
  }
  if (call.grad_weights != nullptr) {
    const bool to_logits = options.score == Score::softmax_topk;
    add_grad_of_weights(call, scores, token, to_logits ? of_logits : grads);
  }
  const Vec dot(is_sigmoid ? 0.0f : dot_of(scores.probabilities, grads, n));
  const float grad_z = call.grad_z_sum == nullptr ? 0.0f : *call.grad_z_sum;
  const Vec of_log(2.0f * grad_z * scores.log_of_sum);
  const Pointer<Any> target = call.grad_logits.row<Any>(token);
  for_each_vector(0, n, [&](int64_t i, int count) {
    const Vec p = Vec::load(scores.probabilities + i, count), grad = Vec::load(grads + i, count);
    Vec result = Vec::load(of_logits + i, count);
    if (is_sigmoid) {
      const Vec s = Vec::load(scores.sigmoids + i, count);
      result = result + grad_through_sigmoid(Vec::load(scores.logits + i, count), s, grad);
    } else {
      result = result + grad_through_softmax(p, grad, dot);
    }
    if (call.grad_z_sum != nullptr) result = result + of_log * p;
    result.store(target + i, count);
  });
}

inline void route_backward_tokens(const RouteBackward& call, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) route_backward_token(call, token);
}
