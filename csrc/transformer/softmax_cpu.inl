// The loops of softmax over one row; T is the storage type of all tensors, or Any. Scores are
// worked out once, for as many columns as the stack has room for, and again beyond them.
#include "common/simd/row_sums.inl"
#include "transformer/softmax_math.inl"

constexpr int64_t kHeldScores = 16384;  // 64 KiB of the stack

// What takes part in one row.
template <class T>
class RowScores {
 public:
  RowScores(const Softmax& softmax, int64_t row)
      : scores_(softmax.scores),
        n_(softmax.length),
        keys_(keys_of(scores_, row, n_)),
        x_(softmax.x.row<T>(row)) {
    if (scores_.slopes != nullptr) {
      slope_ = scores_.slopes[scores_.slope_rows.place(row)];
      position_ = scores_.position(row);
    }
    if (scores_.mask.kind != SoftmaxMask::Kind::none) mask_place_ = scores_.mask.rows.place(row);
  }

  // The first column that is worked on: one where the running sums of a row begin anew.
  int64_t begin() const { return keys_.first / 32 * 32; }
  int64_t end() const { return keys_.end; }

  // The scores from column i on; -inf for what takes no part, and in lanes beyond the row.
  Vec at(int64_t i, int count) const {
    Vec score = Vec::load(x_ + i, count) * Vec(scores_.scale);
    if (scores_.soft_cap > 0) score = capped(score, scores_.soft_cap);
    if (scores_.slopes != nullptr) {
      score = biased(score, abs(Vec(float(position_ - i)) - lanes()), slope_);
    }
    if (scores_.mask.kind != SoftmaxMask::Kind::none) score = masked(score, i, count);
    if (i < keys_.first || i + Vec::size > keys_.end) {
      const Vec lane = lanes();
      const Mask seen = (lane >= near(keys_.first - i)) & (lane < near(keys_.end - i));
      score = select(seen, score, Vec(-INFINITY));
    }
    return score;
  }

 private:
  static Vec lanes() {
    constexpr float kLanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return Vec::load(kLanes, Vec::size);
  }

  // A column relative to a vector, not further off than it matters.
  static Vec near(int64_t lane) {
    return Vec(float(lane < -1 ? -1 : lane > Vec::size ? Vec::size : lane));
  }

  Vec masked(Vec score, int64_t i, int count) const {
    const SoftmaxMask& mask = scores_.mask;
    const int64_t place = mask_place_ + i * mask.column_stride;
    if (mask.kind == SoftmaxMask::Kind::added) {
      return with_mask_added(score, added_mask(place, count));
    }
    const uint8_t* bytes = static_cast<const uint8_t*>(mask.data) + place;
    uint8_t buffer[Vec::size];
    if (mask.column_stride != 1) {
      for (int k = 0; k < count; ++k) buffer[k] = bytes[k * mask.column_stride];
      bytes = buffer;
    }
    // An integer below 2^23 as the lowest bits of a float: a subnormal one, but never arithmetic.
    const Vec value = float_of(Ints::load(bytes, count) + Ints(0x4b000000u));
    const Mask is_zero = value == Vec(0x1p23f);
    const bool zero_is_out = mask.kind == SoftmaxMask::Kind::takes_part;
    return select(zero_is_out ? is_zero : !is_zero, Vec(-INFINITY), score);
  }

  Vec added_mask(int64_t place, int count) const {
    const SoftmaxMask& mask = scores_.mask;
    const Pointer<Any> first = Pointer<Any>{const_cast<void*>(mask.data), mask.dtype} + place;
    if (mask.column_stride == 1) return Vec::load(first, count);
    float buffer[Vec::size];
    for (int k = 0; k < count; ++k) {
      Vec::load(first + k * mask.column_stride, 1).store(buffer + k, 1);
    }
    return Vec::load(buffer, count);
  }

  const Scores& scores_;
  int64_t n_;
  Keys keys_;
  Pointer<T> x_;
  float slope_ = 0;
  int64_t position_ = 0, mask_place_ = 0;
};

template <class T>
inline void store_zeros(Pointer<T> target, int64_t begin, int64_t end) {
  for_each_vector(begin, end, [&](int64_t i, int count) { Vec(0.0f).store(target + i, count); });
}

// The largest one; NaN if any is NaN.
template <class At>
inline float largest_of_row(int64_t begin, int64_t end, const At& at) {
  constexpr int kLanes = 64, kVecs = kLanes / Vec::size;  // enough that none waits for another
  Vec largest[kVecs];
  for (int v = 0; v < kVecs; ++v) largest[v] = Vec(-INFINITY);
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    for (int v = 0; v < kVecs; ++v) {
      largest[v] = max(largest[v], at(i + v * Vec::size, Vec::size));
    }
  }
  for (; i < end; i += Vec::size) {
    largest[0] = max(largest[0], at(i, int(end - i < Vec::size ? end - i : Vec::size)));
  }
  for (int v = 1; v < kVecs; ++v) largest[0] = max(largest[0], largest[v]);
  float lanes[Vec::size];
  largest[0].store(lanes, Vec::size);
  for (int k = 1; k < Vec::size; ++k) lanes[0] = dsx::max(lanes[0], lanes[k]);
  return lanes[0];
}

template <class T>
inline void softmax_of_row(const Softmax& softmax, int64_t row) {
  const RowScores<T> scores(softmax, row);
  const Pointer<T> out = softmax.out.row<T>(row);
  const int64_t n = softmax.length, begin = scores.begin(), end = scores.end();
  const int64_t held_end = begin + kHeldScores;
  float held[kHeldScores];
  // Of vectors that go beyond the last key, the whole vector counts: it is in the row's memory.
  const auto whole = [&](int64_t i, int count) {
    return count == Vec::size || n - i >= Vec::size ? Vec::size : int(n - i);
  };
  const float largest = largest_of_row(begin, end, [&](int64_t i, int count) {
    const Vec score = scores.at(i, whole(i, count));
    if (i < held_end) score.store(held + (i - begin), Vec::size);
    return score;
  });
  const Vec shift = shift_of(Vec(largest));
  float sums[1];
  add_row(end - begin, sums, [&](int64_t from_begin, int count, Vec(&terms)[1]) {
    const int64_t i = begin + from_begin;
    if (i < held_end) {
      terms[0] = exp(Vec::load(held + from_begin, Vec::size) - shift);
      terms[0].store(held + from_begin, Vec::size);
    } else {
      terms[0] = exp(scores.at(i, whole(i, count)) - shift);
    }
  });
  const Vec inverse = inverse_of(Vec(sums[0]));
  store_zeros(out, 0, begin);
  store_zeros(out, end, n);
  if (!(sums[0] >= 0)) {  // NaN or inf among the scores: still nothing where none takes part
    for_each_vector(begin, end, [&](int64_t i, int count) {
      const Vec score = scores.at(i, whole(i, count));
      select(score == Vec(-INFINITY), Vec(0.0f), inverse).store(out + i, count);
    });
    return;
  }
  for_each_vector(begin, end, [&](int64_t i, int count) {
    const Vec power = i < held_end ? Vec::load(held + (i - begin), Vec::size)
                                   : exp(scores.at(i, whole(i, count)) - shift);
    (power * inverse).store(out + i, count);
  });
}

template <class T>
inline void softmax_rows(const Softmax& softmax, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) softmax_of_row<T>(softmax, row);
}

template <class T>
inline void softmax_backward_of_row(const SoftmaxBackward& softmax, int64_t row) {
  const Scores& scores = softmax.scores;
  const Pointer<T> out = softmax.out.row<T>(row), grad_out = softmax.grad_out.row<T>(row);
  const Pointer<T> x = softmax.x.row<T>(row), grad_x = softmax.grad_x.row<T>(row);
  const int64_t n = softmax.length;
  const Keys keys = keys_of(scores, row, n);
  const int64_t begin = keys.first / 32 * 32, end = keys.end;
  float sums[1];
  add_row(end - begin, sums, [&](int64_t from_begin, int count, Vec(&terms)[1]) {
    const int64_t i = begin + from_begin;
    terms[0] = grad_term(Vec::load(out + i, count), Vec::load(grad_out + i, count));
  });
  const Vec dot(sums[0]), scale(scores.scale);
  store_zeros(grad_x, 0, begin);
  store_zeros(grad_x, end, n);
  for_each_vector(begin, end, [&](int64_t i, int count) {
    const Vec result = Vec::load(out + i, count), grad = Vec::load(grad_out + i, count);
    Vec of_x = grad_of_score(result, grad, dot) * scale;
    if (x) {
      const Vec factor = slope_under_cap(Vec::load(x + i, count) * scale, scores.soft_cap);
      of_x = select(result == Vec(0.0f), Vec(0.0f), of_x * factor);
    }
    of_x.store(grad_x + i, count);
  });
}

template <class T>
inline void softmax_backward_rows(const SoftmaxBackward& softmax, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) softmax_backward_of_row<T>(softmax, row);
}
