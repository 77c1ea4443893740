// The loops of rms_norm over one row and over a group of rows; T is the storage type of all
// tensors, or Any. A row is read from memory once: the second time it is in the cache.
#include "common/simd/add_partials.inl"
#include "common/simd/row_sums.inl"
#include "transformer/rms_norm_math.inl"

template <class T>
inline Vec weight_at(Pointer<T> weight, int64_t i, int count) {
  return weight ? Vec::load(weight + i, count) : Vec(1.0f);
}

template <class T>
inline void normalize_row(const RmsNorm& norm, int64_t row) {
  const int64_t n = norm.length;
  const Pointer<T> weight = norm.weight.row<T>(0), out = norm.out.row<T>(row);
  const Pointer<T> residual = norm.residual.row<T>(row), sum = norm.sum.row<T>(row);
  Pointer<T> x = norm.x.row<T>(row);
  if (residual) {
    for_each_vector(0, n, [&](int64_t i, int count) {
      (Vec::load(x + i, count) + Vec::load(residual + i, count)).store(sum + i, count);
    });
    x = sum;  // as it was rounded
  }
  float squares[1];
  add_row(n, squares, [&](int64_t i, int count, Vec(&terms)[1]) {
    const Vec value = Vec::load(x + i, count);
    terms[0] = value * value;
  });
  const Vec inverse = inverse_rms(Vec(squares[0]), float(n), norm.eps);
  for_each_vector(0, n, [&](int64_t i, int count) {
    const Vec value = Vec::load(x + i, count);
    normalized(value, inverse, weight_at(weight, i, count)).store(out + i, count);
  });
}

template <class T>
inline void normalize_rows(const RmsNorm& norm, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) normalize_row<T>(norm, row);
}

// Adds to `partial` what this row adds to the gradient of the weight; the first row of a group
// overwrites it.
template <class T>
inline void backward_of_row(const RmsNormBackward& norm, int64_t row, float* partial, bool first) {
  const int64_t n = norm.length;
  const Pointer<T> x = norm.x.row<T>(row), grad_out = norm.grad_out.row<T>(row);
  const Pointer<T> grad_x = norm.grad_x.row<T>(row), grad_sum = norm.grad_sum.row<T>(row);
  const Pointer<T> weight = norm.weight.row<T>(0);
  float sums[2];
  add_row(n, sums, [&](int64_t i, int count, Vec(&terms)[2]) {
    const Vec value = Vec::load(x + i, count);
    terms[0] = value * value;
    terms[1] = value * (Vec::load(grad_out + i, count) * weight_at(weight, i, count));
  });
  const Vec inverse = inverse_rms(Vec(sums[0]), float(n), norm.eps);
  const Vec share = rms_share(Vec(sums[1]), inverse, float(n));
  for_each_vector(0, n, [&](int64_t i, int count) {
    const Vec value = Vec::load(x + i, count), grad = Vec::load(grad_out + i, count);
    Vec result = grad_of_x(value, grad * weight_at(weight, i, count), inverse, share);
    if (grad_sum) result = result + Vec::load(grad_sum + i, count);
    result.store(grad_x + i, count);
    if (partial == nullptr) return;
    const Vec term = grad_of_weight(value, grad, inverse);
    (first ? term : Vec::load(partial + i, count) + term).store(partial + i, count);
  });
}

template <class T>
inline void backward_of_groups(const RmsNormBackward& norm, int64_t begin, int64_t end,
                               float* partials) {
  for (int64_t group = begin; group < end; ++group) {
    const int64_t first = group * kRowsOfPartial;
    const int64_t last = first + kRowsOfPartial < norm.rows ? first + kRowsOfPartial : norm.rows;
    float* partial = partials == nullptr ? nullptr : partials + group * norm.length;
    for (int64_t row = first; row < last; ++row) {
      backward_of_row<T>(norm, row, partial, row == first);
    }
  }
}
