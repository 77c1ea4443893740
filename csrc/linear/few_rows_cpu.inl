// What skinny GEMMs do around their sums: blocks of columns, and what
// becomes of the sums of each. Their kernels include activation_math.inl before.
#include "linear/few_rows_math.inl"
#include "common/inverse_rms_math.inl"
#include "common/simd/row_sums.inl"

constexpr int64_t kColumns = 64;  // of a block, whose part of the weight fits the second cache

// How many bytes ahead of its use to ask for the weight, of which so many rows are read side by
// side: the same place of rows that come soon, or, where those up to there take too much of a
// cache, of the same row.
inline int64_t ahead_of(int64_t row_bytes, int side_by_side) {
  constexpr int64_t kMost = 131072;
  for (int64_t rows = 16; rows >= side_by_side; rows /= 2) {
    if (rows * row_bytes <= kMost) return rows * row_bytes;
  }
  return kPrefetchBytes;
}

// What each row's sums are multiplied with, for the norm before the layer if there is one.
inline void find_inverses(const FewRows& call, float (&inverses)[kMostRows]) {
  if (!call.squares.is_present()) return;
  for (int64_t row = 0; row < call.rows; ++row) {
    const float* const squares = call.squares.row<float>(row).address;
    float sum[1];
    add_row(call.length / kSquared, sum, [&](int64_t i, int lanes, Vec(&terms)[1]) {
      terms[0] = Vec::load(squares + i, lanes);
    });
    float found[Vec::size];
    inverse_rms_of_row(Vec(sum[0]), call.length, call.eps).store(found, Vec::size);
    inverses[row] = found[0];
  }
}

// Begins the norm after the layer with some results of a row, as they were rounded.
inline void begin_norm(const FewRows& call, int64_t row, int64_t begin, int64_t columns) {
  const Pointer<Any> out = call.out.row<Any>(row) + begin;
  const Pointer<Any> weight = call.norm_weight.row<Any>(0) + begin;
  const Pointer<Any> scaled = call.scaled.row<Any>(row) + begin;
  float squares[kColumns];
  for_each_vector(0, columns, [&](int64_t i, int lanes) {
    const Vec value = Vec::load(out + i, lanes);
    scaled_for_norm(value, Vec::load(weight + i, lanes), call.weight_offset)
        .store(scaled + i, lanes);
    (value * value).store(squares + i, lanes);
  });
  float* const sums = call.out_squares.row<float>(row).address + begin / kSquared;
  for (int64_t i = 0; i < columns; i += kSquared) {
    float* const some = squares + i;
    for (int64_t step = 1; step < kSquared; step *= 2) {
      for (int64_t k = 0; k < kSquared; k += 2 * step) some[k] += some[k + step];
    }
    sums[i / kSquared] = some[0];
  }
}

// Rounds the results of one row, whose sums the norm before the layer multiplies with `inverse`.
inline void finish_row(const FewRows& call, int64_t row, int64_t begin, int64_t columns,
                       float inverse, const float* sums, const float* gated_sums) {
  const Pointer<Any> target = call.out.row<Any>(row) + begin;
  for_each_vector(0, columns, [&](int64_t i, int lanes) {
    Vec sum = Vec::load(sums + i, lanes), up(0.0f);
    if (call.gated) up = Vec::load(gated_sums + i, lanes);
    if (call.squares.is_present()) sum = sum * Vec(inverse), up = up * Vec(inverse);
    if (call.bias.is_present()) {
      const Pointer<Any> bias = call.bias.row<Any>(0) + (begin + i);
      sum = sum + Vec::load(bias, lanes);
      if (call.gated) up = up + Vec::load(bias + call.columns, lanes);
    }
    Vec result = activated_sum(call, sum, up);
    if (call.residual.is_present()) {
      result = result + Vec::load(call.residual.row<Any>(row) + (begin + i), lanes);
    }
    result.store(target + i, lanes);
  });
  if (call.scaled.is_present()) begin_norm(call, row, begin, columns);
}

// Works out columns [begin, end) of all rows; where a norm is after them, kSquared at a time.
// sums_of_block(first, columns, totals) gives the sums of up to kColumns rows of the weight, of
// which the first one has that number: totals[row * kColumns + column].
template <class SumsOfBlock>
inline void for_each_block(const FewRows& call, int64_t begin, int64_t end,
                           const SumsOfBlock& sums_of_block) {
  float totals[2][kMostRows * kColumns], inverses[kMostRows] = {};
  find_inverses(call, inverses);
  for (int64_t c = begin; c < end; c += kColumns) {
    const int64_t columns = end - c < kColumns ? end - c : kColumns;
    sums_of_block(c, columns, totals[0]);
    if (call.gated) sums_of_block(call.columns + c, columns, totals[1]);
    for (int64_t row = 0; row < call.rows; ++row) {
      const int64_t at = row * kColumns;
      finish_row(call, row, c, columns, inverses[row], totals[0] + at, totals[1] + at);
    }
  }
}
