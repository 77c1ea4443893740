// The loops of permute and unpermute over one token.
#include "common/simd/copy_row.inl"
#include "common/simd/row_sums.inl"

inline float number_at(const Rows& numbers, int64_t i) {
  float values[Vec::size];  // a whole register, or GCC warns of what a part of one never writes
  Vec::load(numbers.row<Any>(i), 1).store(values, Vec::size);
  return values[0];
}

inline void permute_tokens(const Permute& call, int64_t begin, int64_t end) {
  const int64_t bytes = call.length * bytes_of(call.x.dtype), k = call.slots.k;
  const bool past_cache = go_past_cache(call.out, call.slots.rows, call.length);
  for (int64_t token = begin; token < end; ++token) {
    const void* source = bytes_of_row(call.x, token);
    for (int64_t j = token * k; j < (token + 1) * k; ++j) {
      const int64_t place = call.slots.places[j];
      if (!call.slots.is_row(place)) continue;
      copy_row(source, bytes_of_row(call.out, place), bytes, past_cache);
    }
  }
  end_past_cache();
}

// Columns whose sums are kept as floats in the first cache, while rows come one after the other.
constexpr int64_t kColumns = 1024;

// The sum over the choices of a token, from the first choice to the last, of some columns.
template <class T>
inline void add_choices(const Unpermute& call, int64_t token, int64_t column, int64_t columns) {
  float sums[kColumns];
  bool is_empty = true;
  for (int64_t j = token * call.slots.k; j < (token + 1) * call.slots.k; ++j) {
    const int64_t place = call.slots.places[j];
    if (!call.slots.is_row(place)) continue;
    const Pointer<T> row = call.y.row<T>(place) + column;
    const Vec weight(call.weights.is_present() ? number_at(call.weights, j) : 1.0f);
    for_each_vector(0, columns, [&](int64_t i, int count) {
      const Vec term = Vec::load(row + i, count) * weight;
      (is_empty ? term : Vec::load(sums + i, count) + term).store(sums + i, count);
    });
    is_empty = false;
  }
  const Pointer<T> out = call.out.even_row<T>(token) + column;
  for_each_vector(0, columns, [&](int64_t i, int count) {
    (is_empty ? Vec(0.0f) : Vec::load(sums + i, count)).store(out + i, count);
  });
}

template <class T>
inline void unpermute_token(const Unpermute& call, int64_t token) {
  for (int64_t column = 0; column < call.length; column += kColumns) {
    add_choices<T>(call, token, column, std::min(kColumns, call.length - column));
  }
}

template <class T>
inline void unpermute_tokens(const Unpermute& call, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) unpermute_token<T>(call, token);
}

// A row's gradient, and returns that of its weight.
template <class T>
inline float backward_of_row(const UnpermuteBackward& call, int64_t token, int64_t place,
                             float weight, bool past_cache) {
  const Pointer<T> grad_out = call.grad_out.row<T>(token);
  const Pointer<T> y = call.y.row<T>(place), grad_y = call.grad_y.even_row<T>(place);
  float dot[1];
  add_row(call.length, dot, [&](int64_t i, int count, Vec(&terms)[1]) {
    const Vec grad = Vec::load(grad_out + i, count);
    terms[0] = grad * Vec::load(y + i, count);  // beyond `count`: 0
    (grad * Vec(weight)).store(grad_y + i, count, past_cache);
  });
  return dot[0];
}

template <class T>
inline void unpermute_backward_tokens(const UnpermuteBackward& call, int64_t begin, int64_t end) {
  const int64_t k = call.slots.k;
  const bool past_cache = go_past_cache(call.grad_y, call.slots.rows, call.length);
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t j = token * k; j < (token + 1) * k; ++j) {
      const int64_t place = call.slots.places[j];
      float grad = 0;
      if (call.slots.is_row(place)) {
        grad = backward_of_row<T>(call, token, place, number_at(call.weights, j), past_cache);
      }
      Vec(grad).store(call.grad_weights.row<Any>(j), 1);
    }
  }
  end_past_cache();
}
