// What the matrix multiplications on few rows do around their sums: blocks of columns, and what
// becomes of the sums of each. Their kernels include activation_math.inl before.
#include "common/few_rows_math.inl"

constexpr int64_t kColumns = 64;  // of a block, whose part of the weight fits the second cache

// Rounds the results of one row.
inline void finish_row(const FewRows& call, int64_t row, int64_t begin, int64_t columns,
                       const float* sums, const float* gated_sums) {
  const Pointer<Any> target = call.out.row<Any>(row) + begin;
  for_each_vector(0, columns, [&](int64_t i, int lanes) {
    Vec sum = Vec::load(sums + i, lanes), up(0.0f);
    if (call.gated) up = Vec::load(gated_sums + i, lanes);
    if (call.bias.data) {
      const Pointer<Any> bias = call.bias.row<Any>(0) + (begin + i);
      sum = sum + Vec::load(bias, lanes);
      if (call.gated) up = up + Vec::load(bias + call.columns, lanes);
    }
    Vec result = activated_sum(call, sum, up);
    if (call.residual.data) {
      result = result + Vec::load(call.residual.row<Any>(row) + (begin + i), lanes);
    }
    result.store(target + i, lanes);
  });
}

// Works out columns [begin, end) of all rows. sums_of_block(first, columns, totals) gives the sums
// of up to kColumns rows of the weight, of which the first one has that number:
// totals[row * kColumns + column].
template <class SumsOfBlock>
inline void for_each_block(const FewRows& call, int64_t begin, int64_t end,
                           const SumsOfBlock& sums_of_block) {
  float totals[2][kMostRows * kColumns];
  for (int64_t c = begin; c < end; c += kColumns) {
    const int64_t columns = end - c < kColumns ? end - c : kColumns;
    sums_of_block(c, columns, totals[0]);
    if (call.gated) sums_of_block(call.columns + c, columns, totals[1]);
    for (int64_t row = 0; row < call.rows; ++row) {
      const int64_t at = row * kColumns;
      finish_row(call, row, c, columns, totals[0] + at, totals[1] + at);
    }
  }
}
