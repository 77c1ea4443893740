// The loops of a norm over one row and over a group of rows; Kind is RmsNorm or LayerNorm, T the
// storage type of all tensors, or Any. A row is read from memory once: after that it is in the
// cache.
#include "common/inverse_rms_math.inl"
#include "common/simd/add_partials.inl"
#include "common/simd/row_sums.inl"
#include "norm/norm_math.inl"

// Loops for a storage type of their own are for the processors and the types that norms are run
// with: each takes most of a second to compile.
#ifdef __x86_64__
constexpr int kLeastLanes = 16;
#else
constexpr int kLeastLanes = 4;
#endif
template <class T>
using Stored = std::conditional_t<Vec::size >= kLeastLanes && !std::is_same_v<T, Half>, T, Any>;

template <class T>
inline Vec weight_at(Pointer<T> weight, float offset, int64_t i, int count) {
  return weight ? Vec::load(weight + i, count) + Vec(offset) : Vec(1.0f);
}

// The first `count` lanes, and zeros.
inline Vec first_lanes(const Vec& values, int count) {
  if (count == Vec::size) return values;
  float lanes[Vec::size];
  values.store(lanes, Vec::size);
  return Vec::load(lanes, count);
}

// What a row has for its elements to be normalized by, and for their gradients.
struct RowMoments {
  float mean = 0, rest = 0;  // 0 but in layer normalization
  float inverse = 0;         // of the rms
  float grad_mean = 0;       // of the weighted gradients; 0 but in layer normalization
  float dot = 0;             // of deviations and weighted gradients

  template <class Kind>
  Vec deviation_of(const Vec& x) const {
    if constexpr (!Kind::kCentered) return x;
    return deviation(x, Vec(mean), Vec(rest));
  }
  template <class Kind>
  Vec standardized_of(const Vec& x) const {
    if constexpr (!Kind::kCentered) return standardized(x, Vec(inverse));
    return standardized(x, Vec(inverse), Vec(mean), Vec(-rest * inverse));
  }
};

// Memory that is asked for while a row is worked on that is in the cache: what the next one reads
// and what this one writes. Measured with 4,096 rows of 4,096 on a Zen 4 beside other work: the
// forward pass takes 5 to 8 % less time, the backward pass, which has two more streams, 10 % more.
template <class T>
struct Soon {
  static constexpr int64_t kLongest = 32768;  // so that it all stays in the cache
  Pointer<T> read[2], written;                // null: nothing

  void ask_for(int64_t i) const {
    if constexpr (Vec::size < 16) return;  // an element at a time it would cost more than it saves
    for (const Pointer<T>& each : read) {
      if (each) __builtin_prefetch((each + i).address);
    }
    if (written) __builtin_prefetch((written + i).address, 1);
  }
};

// Of the first elements, a few.
template <class Value>
inline float mean_of_first(int64_t n, const Value& value_at) {
  constexpr int kFew = 16;
  const int few = n < kFew ? int(n) : kFew;
  float sum = 0;
  for (int i = 0; i < few; i += Vec::size) {
    float lanes[Vec::size];
    const int count = few - i < Vec::size ? few - i : Vec::size;
    value_at(i, count).store(lanes, Vec::size);
    for (int k = 0; k < count; ++k) sum += lanes[k];
  }
  return sum / float(few);
}

// `value_at` is a function of (i, count) that gives a Vec; so is `grad_at`, the gradient times the
// weight, but without gradients.
struct NoGrads {};
template <class Kind, class T, class Value, class Grad>
inline RowMoments moments_of(int64_t n, float eps, const Value& value_at, const Grad& grad_at,
                             const Soon<T>& soon) {
  constexpr bool kGrads = !std::is_same_v<Grad, NoGrads>;
  const float inverse_n = 1.0f / float(n);
  const auto add_up = [&](float near) DSX_INLINED {
    constexpr int kDot = 1, kValues = 1 + kGrads, kSums = (1 + kGrads) * (1 + Kind::kCentered);
    float sums[kSums];
    add_row(n, sums, [&](int64_t i, int count, Vec(&terms)[kSums]) DSX_INLINED {
      soon.ask_for(i);
      Vec value = value_at(i, count);
      if constexpr (Kind::kCentered) {
        value = first_lanes(value - Vec(near), count);
        terms[kValues] = value;
      }
      terms[0] = value * value;
      if constexpr (kGrads) {
        const Vec grad = grad_at(i, count);
        terms[kDot] = value * grad;
        if constexpr (Kind::kCentered) terms[kValues + 1] = grad;
      }
    });
    NormSums found;
    found.squares = sums[0];
    if constexpr (kGrads) found.dot = sums[kDot];
    if constexpr (Kind::kCentered) found.values = sums[kValues];
    if constexpr (Kind::kCentered && kGrads) found.grads = sums[kValues + 1];
    return found;
  };
  RowMoments row;
  NormSums sums;
  if constexpr (Kind::kCentered) {
    float near = mean_of_first(n, value_at);
    for (int attempt = 0; attempt < 2; ++attempt) {
      sums = add_up(near);
      if (attempt == 1 || !sums.are_far(inverse_n)) break;
      near += sums.values * inverse_n;
    }
    const float shift = sums.values * inverse_n;
    const RowMean mean(near, shift);
    row.mean = mean.mean;
    row.rest = mean.rest;
    row.grad_mean = sums.grads * inverse_n;
    sums.dot -= shift * sums.grads;
    sums.squares = sums.squared_deviations(inverse_n);
  } else {
    sums = add_up(0);
  }
  row.dot = sums.dot;
  const auto inverse_of = [&](float squares, float eps) {
    float lanes[Vec::size];
    inverse_rms(Vec(squares), inverse_n, eps).store(lanes, Vec::size);
    return lanes[0];
  };
  row.inverse = inverse_of(sums.squares, eps);
  if (squares_fit(row.inverse)) return row;
  const float scale = scale_of_squares(row.inverse);
  float squares[1];
  add_row(n, squares, [&](int64_t i, int count, Vec(&terms)[1]) {
    const Vec value = row.template deviation_of<Kind>(value_at(i, count)) * Vec(scale);
    terms[0] = first_lanes(value * value, count);
  });
  row.inverse = inverse_of(squares[0], eps * scale * scale) * scale;
  const float most = inverse_of(0, eps);  // when eps has vanished
  if (row.inverse > most) row.inverse = most;
  return row;
}

template <class Kind, class T, class Value>
inline void normalize(const Norm& norm, int64_t row, bool past_cache, const Value& value_at) {
  const Pointer<T> weight = norm.weight.row<T>(0), bias = norm.bias.row<T>(0);
  const Pointer<T> out = norm.out.row<T>(row);
  Soon<T> soon = {};
  if (row + 1 < norm.rows && norm.length <= soon.kLongest) {
    soon = {{norm.x.row<T>(row + 1), norm.residual.row<T>(row + 1)}, out};
    if (past_cache) soon.written = {};
  }
  const RowMoments moments = moments_of<Kind>(norm.length, norm.eps, value_at, NoGrads{}, soon);
  for_each_vector(0, norm.length, [&](int64_t i, int count) {
    const Vec value = moments.template standardized_of<Kind>(value_at(i, count));
    const Vec scale = weight_at(weight, norm.weight_offset, i, count);
    const Vec result =
        bias ? normalized(value, scale, Vec::load(bias + i, count)) : normalized(value, scale);
    result.store(out + i, count, past_cache);
  });
}

template <class Kind, class T>
inline void normalize_row(const Norm& norm, int64_t row, bool past_cache) {
  const Pointer<T> x = norm.x.row<T>(row), residual = norm.residual.row<T>(row);
  const Pointer<T> x_bias = norm.x_bias.row<T>(0);
  const auto sum_at = [&](int64_t i, int count) {
    Vec value = Vec::load(x + i, count);
    if (x_bias) value = value + Vec::load(x_bias + i, count);
    return value + Vec::load(residual + i, count);
  };
  Pointer<T> source = x;
  if (residual) {
    // As it is rounded, where it is wanted or, for the time being, where the result will be.
    source = norm.sum.is_present() ? norm.sum.row<T>(row) : norm.out.row<T>(row);
    for_each_vector(0, norm.length,
                    [&](int64_t i, int count) { sum_at(i, count).store(source + i, count); });
  }
  const auto value_at = [&](int64_t i, int count) { return Vec::load(source + i, count); };
  normalize<Kind, T>(norm, row, past_cache && source.address != norm.out.row<T>(row).address,
                     value_at);
}

template <class Kind, class T>
inline void normalize_rows(const Norm& norm, int64_t begin, int64_t end) {
  const bool past_cache = go_past_cache(norm.out, norm.rows, norm.length);
  for (int64_t row = begin; row < end; ++row) normalize_row<Kind, Stored<T>>(norm, row, past_cache);
  end_past_cache();
}

// What a row's gradients need, as it is told to whoever goes down the columns.
struct RowGradients {
  RowMoments moments;
  float share;

  RowGradients(const RowMoments& of_row, float n) : moments(of_row) {
    float lanes[Vec::size];
    rms_share(Vec(of_row.dot), Vec(of_row.inverse), 1 / n).store(lanes, Vec::size);
    share = lanes[0];
  }
  explicit RowGradients(const float* memory) : share(memory[4]) {
    moments.mean = memory[0];
    moments.rest = memory[1];
    moments.inverse = memory[2];
    moments.grad_mean = memory[3];
  }
  void store(float* memory) const {
    const float all[kFloatsOfRow] = {moments.mean, moments.rest, moments.inverse, moments.grad_mean,
                                     share};
    memcpy(memory, all, sizeof(all));
  }

  template <class Kind>
  Vec of_x(const Vec& standard, const Vec& weighted_grad) const {
    const Vec inverse(moments.inverse);
    if constexpr (!Kind::kCentered) {
      return grad_of_x(standard, weighted_grad, inverse, Vec(share));
    }
    return grad_of_x(standard, weighted_grad, inverse, Vec(share),
                     Vec(moments.grad_mean) * inverse);
  }
};

// Adds to `partials` what this row adds to the gradients of vectors; the first row of a group
// overwrites them.
template <class Kind, class T>
inline RowGradients backward_of_row(const NormBackward& norm, int64_t row,
                                    const OfVectors<float*>& partials, bool first,
                                    bool past_cache) {
  const int64_t n = norm.length;
  const Pointer<T> x = norm.x.row<T>(row), grad_out = norm.grad_out.row<T>(row);
  const Pointer<T> grad_x = norm.grad_x.row<T>(row), grad_sum = norm.grad_sum.row<T>(row);
  const Pointer<T> weight = norm.weight.row<T>(0);
  const auto weighted_grad = [&](int64_t i, int count) {
    return Vec::load(grad_out + i, count) * weight_at(weight, norm.weight_offset, i, count);
  };
  const auto value_at = [&](int64_t i, int count) { return Vec::load(x + i, count); };
  Soon<T> soon = {};
  if (past_cache && row + 1 < norm.rows && n <= soon.kLongest) {
    soon = {{norm.x.row<T>(row + 1), norm.grad_out.row<T>(row + 1)}, {}};
  }
  const RowMoments moments = moments_of<Kind>(n, norm.eps, value_at, weighted_grad, soon);
  const RowGradients grads(moments, float(n));
  const auto before = [&](float* partial, int64_t i, int count) {
    return first ? Vec(0.0f) : Vec::load(partial + i, count);
  };
  const auto add = [&](float* partial, int64_t i, int count, const Vec& term) {
    if (partial != nullptr) (before(partial, i, count) + term).store(partial + i, count);
  };
  for_each_vector(0, n, [&](int64_t i, int count) {
    const Vec value = moments.template standardized_of<Kind>(value_at(i, count));
    const Vec grad = Vec::load(grad_out + i, count);
    Vec result =
        grads.template of_x<Kind>(value, grad * weight_at(weight, norm.weight_offset, i, count));
    if (grad_sum) result = result + Vec::load(grad_sum + i, count);
    result.store(grad_x + i, count, past_cache);
    if (partials.weight != nullptr) {
      add_grad_of_weight(value, grad, before(partials.weight, i, count))
          .store(partials.weight + i, count);
    }
    add(partials.bias, i, count, grad);
    add(partials.x_bias, i, count, result);
  });
  return grads;
}

template <class Kind, class T>
inline void backward_of_rows(const NormBackward& norm, int64_t begin, int64_t end, float* of_rows) {
  const bool past_cache = go_past_cache(norm.grad_x, norm.rows, norm.length);
  for (int64_t row = begin; row < end; ++row) {
    backward_of_row<Kind, Stored<T>>(norm, row, {}, false, past_cache)
        .store(of_rows + row * kFloatsOfRow);
  }
  end_past_cache();
}

// Sums over rows, added up as those of groups are.
template <class Kind>
inline void backward_of_columns(const NormBackward& norm, const float* of_rows, int64_t begin,
                                int64_t end, const OfVectors<Rows>& grads) {
  const int64_t of_one = rows_of_group(norm.rows);
  const Pointer<Any> weight = norm.weight.row<Any>(0);
  for_each_vector(begin, end, [&](int64_t i, int count) {
    const Vec scale = weight_at(weight, norm.weight_offset, i, count);
    OfVectors<double[Vec::size]> totals = {};
    for (int64_t first = 0; first < norm.rows; first += of_one) {
      const int64_t last = first + of_one < norm.rows ? first + of_one : norm.rows;
      Vec weights(0.0f), biases(0.0f), x_biases(0.0f);
      for (int64_t row = first; row < last; ++row) {
        const RowGradients of_row(of_rows + row * kFloatsOfRow);
        const Vec x = Vec::load(norm.x.row<Any>(row) + i, count);
        const Vec value = of_row.moments.template standardized_of<Kind>(x);
        const Vec grad = Vec::load(norm.grad_out.row<Any>(row) + i, count);
        weights = add_grad_of_weight(value, grad, weights);
        biases = biases + grad;
        if (!grads.x_bias.is_present()) continue;
        Vec result = of_row.template of_x<Kind>(value, grad * scale);
        const Pointer<Any> grad_sum = norm.grad_sum.row<Any>(row);
        if (grad_sum) result = result + Vec::load(grad_sum + i, count);
        x_biases = x_biases + result;
      }
      add_to_doubles(weights, totals.weight);
      add_to_doubles(biases, totals.bias);
      add_to_doubles(x_biases, totals.x_bias);
    }
    const auto store = [&](const Rows& grad, const double* total) {
      if (grad.is_present()) rounded(total).store(grad.row<Any>(0) + i, count);
    };
    store(grads.weight, totals.weight);
    store(grads.bias, totals.bias);
    store(grads.x_bias, totals.x_bias);
  });
}

template <class Kind, class T>
inline void backward_of_groups(const NormBackward& norm, int64_t begin, int64_t end,
                               int64_t first_group, const OfVectors<float*>& partials) {
  const bool past_cache = go_past_cache(norm.grad_x, norm.rows, norm.length);
  const int64_t of_one = rows_of_group(norm.rows);
  for (int64_t group = begin; group < end; ++group) {
    const int64_t first = group * of_one;
    const int64_t last = first + of_one < norm.rows ? first + of_one : norm.rows;
    const auto of_group = [&](float* all) {
      return all == nullptr ? nullptr : all + (group - first_group) * norm.length;
    };
    const OfVectors<float*> partial{of_group(partials.weight), of_group(partials.bias),
                                    of_group(partials.x_bias)};
    for (int64_t row = first; row < last; ++row) {
      backward_of_row<Kind, Stored<T>>(norm, row, partial, row == first, past_cache);
    }
  }
  end_past_cache();
}
