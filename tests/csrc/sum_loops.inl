// Loops over Sum16 for test_sum.cpp; lanes beyond the last element hold NaN, which must not count.
#include "common/simd/sum.inl"

template <class Add>
inline double sum_of(const float* values, int64_t n, const Add& add) {
  Sum16 sum;
  for_each_vector(0, n, [&](int64_t i, int count) {
    const Vec value = Vec::load(values + i, count);
    float lanes[Vec::size];
    Vec(NAN).store(lanes, Vec::size);
    value.store(lanes, count);
    add(sum, Vec::load(lanes, Vec::size), i, count);
  });
  return sum.total();
}

inline double plain_sum(const float* values, int64_t n) {
  return sum_of(values, n,
                [](Sum16& sum, Vec value, int64_t i, int count) { sum.add(value, i, count); });
}

inline double sum_of_squares(const float* values, int64_t n) {
  return sum_of(values, n, [](Sum16& sum, Vec value, int64_t i, int count) {
    sum.add_square(value, i, count);
  });
}
