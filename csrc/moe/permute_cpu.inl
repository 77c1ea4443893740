// The loops of permute and unpermute over one token.
#include "common/simd/row_sums.inl"

inline float number_at(const Rows& numbers, int64_t i) {
  float values[Vec::size];  // a whole register, or GCC warns of what a part of one never writes
  Vec::load(numbers.row<Any>(i), 1).store(values, Vec::size);
  return values[0];
}

// The sum over the choices of a token, each element from the first choice to the last.
template <class T>
inline void unpermute_token(const Unpermute& call, int64_t token) {
  const int64_t k = call.slots.k, first = token * k;
  const Pointer<T> out = call.out.even_row<T>(token);
  for_each_vector(0, call.length, [&](int64_t i, int count) {
    Vec sum(0.0f);
    bool is_first = true;
    for (int64_t j = first; j < first + k; ++j) {
      const int64_t place = call.slots.places[j];
      if (!call.slots.is_row(place)) continue;
      Vec term = Vec::load(call.y.row<T>(place) + i, count);
      if (call.weights.is_present()) term = term * Vec(number_at(call.weights, j));
      sum = is_first ? term : sum + term;
      is_first = false;
    }
    sum.store(out + i, count);
  });
}

template <class T>
inline void unpermute_tokens(const Unpermute& call, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) unpermute_token<T>(call, token);
}

// A row's gradient, and returns that of its weight.
template <class T>
inline float backward_of_row(const UnpermuteBackward& call, int64_t token, int64_t place,
                             float weight) {
  const Pointer<T> grad_out = call.grad_out.row<T>(token);
  const Pointer<T> y = call.y.row<T>(place), grad_y = call.grad_y.even_row<T>(place);
  float dot[1];
  add_row(call.length, dot, [&](int64_t i, int count, Vec(&terms)[1]) {
    const Vec grad = Vec::load(grad_out + i, count);
    terms[0] = grad * Vec::load(y + i, count);  // beyond `count`: 0
    (grad * Vec(weight)).store(grad_y + i, count);
  });
  return dot[0];
}

template <class T>
inline void unpermute_backward_tokens(const UnpermuteBackward& call, int64_t begin, int64_t end) {
  const int64_t k = call.slots.k;
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t j = token * k; j < (token + 1) * k; ++j) {
      const int64_t place = call.slots.places[j];
      float grad = 0;
      if (call.slots.is_row(place)) {
        grad = backward_of_row<T>(call, token, place, number_at(call.weights, j));
      }
      Vec(grad).store(call.grad_weights.row<Any>(j), 1);
    }
  }
}
