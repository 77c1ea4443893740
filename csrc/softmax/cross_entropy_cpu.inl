// The loops of cross_entropy over one row; T is the storage type of all tensors, or Any. After the
// first time, a row is read from the cache.
#include "common/simd/row_sums.inl"
#include "softmax/cross_entropy_math.inl"
#include "common/simd/largest.inl"

template <class T>
inline float element_of(Pointer<T> row, int64_t i) {
  float values[Vec::size];  // a whole register, or GCC warns of what a part of one never writes
  Vec::load(row + i, 1).store(values, Vec::size);
  return values[0];
}

template <class T>
inline void store_zeros(Pointer<T> target, int64_t n) {
  for_each_vector(0, n, [&](int64_t i, int count) { Vec(0.0f).store(target + i, count); });
}

// Overwrites the logits, perhaps.
template <class T>
inline void gradients_of_row(const CrossEntropy& call, int64_t row, float largest, float sum) {
  const int64_t n = call.length, target = call.targets[row];
  const Pointer<T> logits = call.logits.row<T>(row), grad = call.grad.row<T>(row);
  if (target == call.ignored) return store_zeros(grad, n);
  const float grad_loss =
      call.grad_loss == nullptr ? 1.0f : call.grad_loss[row * call.grad_loss_pitch];
  const Vec factor(grad_loss / *call.divisor), inverse = Vec(1.0f) / Vec(sum), shift(largest);
  const Vec boost = boost_of_row(Vec(largest), Vec(sum), call.z_loss);
  const Vec share(share_of_class(call.label_smoothing, n)), hit(1.0f - call.label_smoothing);
  const auto gradient = [&](Vec logit, Vec hits) {
    return grad_of_logit(exp_of_negative(logit - shift) * inverse, boost, share, hits, factor);
  };
  const Vec of_target = gradient(Vec(element_of(logits, target)), hit);
  for_each_vector(0, n, [&](int64_t i, int count) {
    gradient(Vec::load(logits + i, count), Vec(0.0f)).store(grad + i, count);
  });
  of_target.store(grad + target, 1);
}

template <class T>
inline void loss_of_row(const CrossEntropy& call, int64_t row) {
  const int64_t n = call.length, target = call.targets[row];
  const Pointer<T> logits = call.logits.row<T>(row);
  const bool is_smooth = call.label_smoothing > 0;
  Largest largest;
  RowSums<1> smoothing_sums, power_sums;
  for_each_vector(0, n, [&](int64_t i, int count) {
    Vec logit = Vec::load(logits + i, count);
    largest.take(first_lanes(logit, count), i);
  });
  const float most = largest.of_all();
  const Vec shift(most == -INFINITY ? 0.0f : most);
  power_sums.add(0, n, [&](int64_t i, int count, Vec(&terms)[1]) {
    terms[0] = exp_of_negative(first_lanes(Vec::load(logits + i, count), count) - shift);
  });
  float sum[1], smoothing[1] = {0.0f};
  power_sums.store(sum);
  if (is_smooth) {
    const Vec share(share_of_class(call.label_smoothing, n));
    smoothing_sums.add(0, n, [&](int64_t i, int count, Vec(&terms)[1]) {
      const Vec logit = Vec::load(logits + i, count);
      terms[0] = first_lanes(smoothing_of_class(Vec(most), logit, share), count, 0.0f);
    });
    smoothing_sums.store(smoothing);
  }
  const Vec of_target(element_of(logits, target));
  loss_of_row(Vec(most), Vec(sum[0]), of_target, Vec(smoothing[0]), call.label_smoothing,
              call.z_loss)
      .store(call.losses + row, 1);
  call.stats[row] = most;
  call.stats[call.rows + row] = sum[0];
}

template <class T>
inline void losses_of_rows(const CrossEntropy& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    if (call.targets[row] == call.ignored) {
      call.losses[row] = call.stats[row] = call.stats[call.rows + row] = 0;
    } else {
      loss_of_row<T>(call, row);
    }
    if (!call.grad.is_present()) continue;
    gradients_of_row<T>(call, row, call.stats[row], call.stats[call.rows + row]);
  }
}

template <class T>
inline void gradients_of_rows(const CrossEntropy& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    gradients_of_row<T>(call, row, call.stats[row], call.stats[call.rows + row]);
  }
}

inline void scale_rows(Rows rows, int64_t length, RowFactors factors, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float factor = factors.of(row);
    if (factor == 1) continue;
    const Pointer<Any> elements = rows.row<Any>(row);
    for_each_vector(0, length, [&](int64_t i, int count) {
      (Vec::load(elements + i, count) * Vec(factor)).store(elements + i, count);
    });
  }
}
