// The loops of softmax over one row; T is the storage type of all tensors, or Any. A row is worked
// on in pieces that the stack has room for: those of a row of one piece are worked out once, those
// of a longer row again when the sum over the row is known.
#include "common/simd/row_sums.inl"
#include "common/simd/largest.inl"
#include "common/softmax_math.inl"

constexpr int64_t kPiece = 16384;  // scores: 64 KiB of the stack

// What takes part in one row.
template <class T>
class RowScores {
 public:
  RowScores(const Softmax& softmax, int64_t row)
      : scores_(softmax.scores),
        n_(softmax.length),
        keys_(keys_of(scores_, row, n_)),
        x_(softmax.x.row<T>(row)),
        soft_cap_(softmax.scores.soft_cap) {
    if (scores_.slopes != nullptr) {
      slope_ = scores_.slopes[scores_.slope_rows.offset(row)];
      position_ = scores_.position(row);
    }
    if (scores_.mask.kind != SoftmaxMask::Kind::none) mask_offset_ = scores_.mask.rows.offset(row);
  }

  // The first column that is worked on: one where the running sums of a row begin anew.
  int64_t begin() const { return keys_.first / 32 * 32; }
  int64_t end() const { return keys_.end; }

  // Writes the scores of columns [begin, end), whole vectors; -inf for what takes no part.
  void write(int64_t begin, int64_t end, float* target, Largest& largest) const {
    const bool is_plain = scores_.soft_cap == 0 && scores_.slopes == nullptr &&
                          scores_.mask.kind == SoftmaxMask::Kind::none;
    const int64_t first = keys_.first <= begin ? begin : begin + 32;  // of those all of which count
    const int64_t last = end / 32 * 32;
    const auto write_slowly = [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i += Vec::size) {
        const Vec score = at(i, int(n_ - i < Vec::size ? n_ - i : Vec::size));
        score.store(target + (i - begin), Vec::size);
        largest.take(score, i);
      }
    };
    if (!is_plain || first >= last) return write_slowly(begin, end);
    write_slowly(begin, first);
    const Vec scale(scores_.scale);
    const Pointer<T> x = x_;
    Largest mine;  // nothing else points to it
    for (int64_t i = first; i < last; i += 32) {
      for (int k = 0; k < 32; k += Vec::size) {
        const Vec score = Vec::load(x + (i + k), Vec::size) * scale;
        score.store(target + (i + k - begin), Vec::size);
        mine.take(score, k);
      }
    }
    largest.take(Vec(mine.of_all()), 0);
    write_slowly(last, end);
  }

 private:
  Vec at(int64_t i, int count) const {
    Vec score = Vec::load(x_ + i, count) * Vec(scores_.scale);
    if (soft_cap_ > 0) score = capped(score, soft_cap_);
    if (scores_.slopes != nullptr) {
      score = biased(score, abs(Vec(float(position_ - i)) - lane_numbers()), slope_);
    }
    if (scores_.mask.kind != SoftmaxMask::Kind::none) score = masked(score, i, count);
    if (i < keys_.first || i + Vec::size > keys_.end) {
      const Vec lane = lane_numbers();
      const Mask seen = (lane >= near(keys_.first - i)) & (lane < near(keys_.end - i));
      score = select(seen, score, Vec(-INFINITY));
    }
    return score;
  }

  // A column relative to a vector, not further off than it matters.
  static Vec near(int64_t lane) {
    return Vec(float(lane < -1 ? -1 : lane > Vec::size ? Vec::size : lane));
  }

  Vec masked(Vec score, int64_t i, int count) const {
    const SoftmaxMask& mask = scores_.mask;
    const int64_t offset = mask_offset_ + i * mask.column_stride;
    if (mask.kind == SoftmaxMask::Kind::added) {
      return with_mask_added(score, added_mask(offset, count));
    }
    const uint8_t* bytes = static_cast<const uint8_t*>(mask.data) + offset;
    uint8_t buffer[Vec::size] = {};
    if (mask.column_stride != 1) {
      for (int k = 0; k < count; ++k) buffer[k] = bytes[k * mask.column_stride];
      bytes = buffer;
    }
    // As the lowest bits of a float: below 2^23 its only arithmetic is to be compared.
    const Mask is_zero = float_of(Ints::load(bytes, count) + Ints(0x4b000000u)) == Vec(0x1p23f);
    const bool zero_is_out = mask.kind == SoftmaxMask::Kind::takes_part;
    return select(zero_is_out ? is_zero : !is_zero, Vec(-INFINITY), score);
  }

  Vec added_mask(int64_t offset, int count) const {
    const SoftmaxMask& mask = scores_.mask;
    const Pointer<Any> first = Pointer<Any>{const_cast<void*>(mask.data), mask.dtype} + offset;
    if (mask.column_stride == 1) return Vec::load(first, count);
    float buffer[Vec::size] = {};
    for (int k = 0; k < count; ++k) {
      Vec::load(first + k * mask.column_stride, 1).store(buffer + k, 1);
    }
    return Vec::load(buffer, count);
  }

  const Scores& scores_;
  int64_t n_;
  Keys keys_;
  Pointer<T> x_;
  float soft_cap_;  // here, as what is written might be where that of scores_ is
  float slope_ = 0;
  int64_t position_ = 0, mask_offset_ = 0;
};

template <class T>
inline void store_zeros(Pointer<T> target, int64_t begin, int64_t end) {
  for_each_vector(begin, end, [&](int64_t i, int count) { Vec(0.0f).store(target + i, count); });
}

// Asks for what the next row reads and this one writes unless it goes past the cache, while it
// computes: on a Zen 4, a row of 4,096 floats takes half of the time then.
template <class T>
inline void prefetch_soon(Pointer<T> read, Pointer<T> written, bool past_cache) {
  __builtin_prefetch(read.address);
  if (!past_cache) __builtin_prefetch(written.address, 1);
}

template <class T>
inline void softmax_of_row(const Softmax& softmax, int64_t row, bool past_cache) {
  const RowScores<T> scores(softmax, row);
  const Pointer<T> out = softmax.out.row<T>(row);
  const int64_t n = softmax.length, begin = scores.begin(), end = scores.end();
  const Pointer<T> next = softmax.x.row<T>(row + 1 < softmax.rows ? row + 1 : row);
  const bool is_one_piece = end - begin <= kPiece;
  float piece[kPiece];  // the scores of columns from `from` on, then their powers
  const auto for_each_piece = [&](const auto& body) {
    for (int64_t from = begin; from < end; from += kPiece) {
      body(from, end - from < kPiece ? end : from + kPiece);
    }
  };
  Largest largest, ignored;
  for_each_piece([&](int64_t from, int64_t to) { scores.write(from, to, piece, largest); });
  const Vec shift = shift_of(Vec(largest.of_all()));
  RowSums<1> sums;
  for_each_piece([&](int64_t from, int64_t to) {
    if (!is_one_piece) scores.write(from, to, piece, ignored);
    sums.add(from, to, [&](int64_t i, int, Vec(&terms)[1]) {
      prefetch_soon(next + i, out + i, past_cache);
      terms[0] = exp_of_negative(Vec::load(piece + (i - from), Vec::size) - shift);
      terms[0].store(piece + (i - from), Vec::size);
    });
  });
  float sum[1];
  sums.store(sum);
  const Vec inverse = inverse_of(Vec(sum[0]));
  store_zeros(out, 0, begin);
  store_zeros(out, end, n);
  const bool is_finite = sum[0] >= 0;  // otherwise a score is NaN or inf
  for_each_piece([&](int64_t from, int64_t to) {
    if (!is_one_piece || !is_finite) scores.write(from, to, piece, ignored);
    for_each_vector(from, to, [&](int64_t i, int count) {
      Vec value = Vec::load(piece + (i - from), Vec::size);
      if (!is_finite) {
        value = select(value == Vec(-INFINITY), Vec(0.0f), inverse);
      } else {
        value = (is_one_piece ? value : exp_of_negative(value - shift)) * inverse;
      }
      value.store(out + i, count, past_cache);
    });
  });
}

template <class T>
inline void softmax_rows(const Softmax& softmax, int64_t begin, int64_t end) {
  const bool past_cache = go_past_cache(softmax.out, softmax.rows, softmax.length);
  for (int64_t row = begin; row < end; ++row) softmax_of_row<T>(softmax, row, past_cache);
  end_past_cache();
}

template <class T>
inline void softmax_backward_of_row(const SoftmaxBackward& softmax, int64_t row, bool past_cache) {
  const Scores& scores = softmax.scores;
  const Pointer<T> out = softmax.out.row<T>(row), grad_out = softmax.grad_out.row<T>(row);
  const Pointer<T> x = softmax.x.row<T>(row), grad_x = softmax.grad_x.row<T>(row);
  const int64_t n = softmax.length;
  const int64_t next = row + 1 < softmax.rows ? row + 1 : row;
  const Pointer<T> next_out = softmax.out.row<T>(next), next_grad = softmax.grad_out.row<T>(next);
  const Keys keys = keys_of(scores, row, n);
  const int64_t begin = keys.first / 32 * 32, end = keys.end;
  float sums[1];
  add_row(end - begin, sums, [&](int64_t from_begin, int count, Vec(&terms)[1]) {
    const int64_t i = begin + from_begin;
    if (past_cache) {
      __builtin_prefetch((next_out + i).address);
      __builtin_prefetch((next_grad + i).address);
    }
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
    of_x.store(grad_x + i, count, past_cache);
  });
}

template <class T>
inline void softmax_backward_rows(const SoftmaxBackward& softmax, int64_t begin, int64_t end) {
  const bool past_cache = go_past_cache(softmax.grad_x, softmax.rows, softmax.length);
  for (int64_t row = begin; row < end; ++row) softmax_backward_of_row<T>(softmax, row, past_cache);
  end_past_cache();
}
