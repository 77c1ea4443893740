// Tests block_sparse_cpu.cpp in every ISA that this CPU has: tensors and masks that end where
// memory ends, forward against double, all results bit for bit against the scalar ISA, what is not
// finite among what is left out.
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/sparse/block_sparse.h"
#include "dtypes.h"
#include "expect.h"

namespace {

using dsx::Dtype;
using dsx::Isa;

struct Lists {
  std::vector<int64_t> row_begins{0}, column_begins{0};
  std::vector<int32_t> of_rows, of_columns;

  // Every block but each third one.
  Lists(int64_t n, bool causal) {
    const auto is_named = [&](int64_t row, int64_t column) {
      return (row * 5 + column) % 3 != 0 && (!causal || column <= row);
    };
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        if (is_named(i, j)) of_rows.push_back(int32_t(j));
        if (is_named(j, i)) of_columns.push_back(int32_t(j));
      }
      row_begins.push_back(int64_t(of_rows.size()));
      column_begins.push_back(int64_t(of_columns.size()));
    }
  }
};

struct Case {
  int64_t heads = 2, tokens, width;
  int block;
  bool causal, masked;
  Lists lists;
  Elements q, k, v, out, grad, grad_q, grad_k, grad_v;
  std::vector<float> lse, deltas, added;
  std::vector<uint8_t> kept;

  Case(Dtype dtype, int of_block, int64_t of_tokens, int64_t of_width, bool is_causal, bool mask)
      : tokens(of_tokens),
        width(of_width),
        block(of_block),
        causal(is_causal),
        masked(mask),
        lists(dsx::ceil_div(of_tokens, of_block), is_causal),
        q(dtype, size(2)),
        k(dtype, size(1)),
        v(dtype, size(1)),
        out(dtype, size(2)),
        grad(dtype, size(2)),
        grad_q(dtype, size(2)),
        grad_k(dtype, size(1)),
        grad_v(dtype, size(1)),
        lse(size_t(2 * tokens)),
        deltas(lse.size()),
        added(size_t(tokens)),
        kept(size_t(tokens * tokens)) {
    fill(q, 2, 0), fill(k, 1, 1), fill(v, 1, 2), fill(grad, 2, 3);
    for (size_t i = 0; i < kept.size(); ++i) kept[i] = i * 7 % 5 != 0;
    for (size_t i = 0; i < added.size(); ++i) added[i] = i % 9 == 4 ? -INFINITY : 0.01f * float(i);
  }

  int64_t size(int64_t of_heads) const { return of_heads * tokens * width; }

  void fill(Elements& elements, int64_t of_heads, float seed) const {
    for (int64_t i = 0; i < size(of_heads); ++i) {
      elements.set(i, std::sin(seed + float(i) * 0.73f));
    }
  }

  dsx::HeadTokens of(Elements& elements, int64_t of_heads) {
    return {elements.address(), elements.dtype(), of_heads * tokens * width, tokens * width, width};
  }

  void run(Isa isa) {
    dsx::BlockSparseBackward call = {};
    dsx::BlockSparse& forward = call.forward;
    forward.batches = 1, forward.heads = heads, forward.kv_heads = 1;
    forward.tokens = tokens, forward.width = width;
    forward.block = block, forward.scale = 0.4f, forward.causal = causal;
    if (masked) {
      forward.mask[0] = {
          dsx::ScoreMask::Kind::takes_part, Dtype::float32, kept.data(), 0, 0, tokens, 1};
      forward.mask[1] = {dsx::ScoreMask::Kind::added, Dtype::float32, added.data(), 0, 0, 0, 1};
      forward.masks = 2;
    }
    forward.rows = {lists.row_begins.data(), lists.of_rows.data()};
    forward.columns = {lists.column_begins.data(), lists.of_columns.data()};
    forward.q = of(q, 2), forward.k = of(k, 1), forward.v = of(v, 1);
    forward.out = of(out, 2), forward.lse = lse.data();
    call.grad_out = of(grad, 2), call.deltas = deltas.data();
    call.grad_q = of(grad_q, 2), call.grad_k = of(grad_k, 1), call.grad_v = of(grad_v, 1);
    const int64_t rows = heads * forward.strips(), columns = forward.strips();
    attend_rows_cpu(isa, forward, 0, 1);
    attend_rows_cpu(isa, forward, 1, rows);
    backward_of_rows_cpu(isa, call, 0, rows);
    backward_of_columns_cpu(isa, call, 0, columns);
  }

  bool sees(int64_t row, int64_t key) const {
    if ((row / block * 5 + key / block) % 3 == 0 || (causal && key > row)) return false;
    return !masked || (kept[size_t(row * tokens + key)] != 0 && added[size_t(key)] != -INFINITY);
  }

  void check() const {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t row = 0; row < tokens; ++row) check_row(head, row);
    }
  }

  void check_row(int64_t head, int64_t row) const {
    std::vector<double> weights(static_cast<size_t>(tokens));
    double total = 0;
    for (int64_t key = 0; key < tokens; ++key) {
      if (!sees(row, key)) continue;
      double score = 0;
      for (int64_t i = 0; i < width; ++i) {
        score += double(q[(head * tokens + row) * width + i]) * double(k[key * width + i]);
      }
      score = score * double(0.4f) + (masked ? double(added[size_t(key)]) : 0.0);
      total += weights[size_t(key)] = std::exp(score);
    }
    const double bound = out.dtype() == Dtype::float32 ? 1e-5 : 1e-2;
    for (int64_t i = 0; i < width; ++i) {
      double sum = 0;
      for (int64_t key = 0; key < tokens; ++key) {
        if (weights[size_t(key)] > 0) sum += weights[size_t(key)] * double(v[key * width + i]);
      }
      const double want = total > 0 ? sum / total : 0;
      const float got = out[(head * tokens + row) * width + i];
      expect(std::abs(double(got) - want) < bound, "block %d row %ld: %g, not %g", block, long(row),
             double(got), want);
    }
  }

  std::vector<float> results() const {
    std::vector<float> all = lse;
    for (const Elements* each : {&out, &grad_q}) {
      for (int64_t i = 0; i < size(2); ++i) all.push_back((*each)[i]);
    }
    for (const Elements* each : {&grad_k, &grad_v}) {
      for (int64_t i = 0; i < size(1); ++i) all.push_back((*each)[i]);
    }
    return all;
  }
};

void expect_same(const Case& a, const Case& b, Isa isa) {
  const std::vector<float> one = a.results(), other = b.results();
  const bool same = std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0;
  expect(same, "%s: other bits for block %d", name_of(isa), a.block);
}

void test_case(Dtype dtype, int block, int64_t tokens, int64_t width, bool causal, bool masked) {
  Case scalar(dtype, block, tokens, width, causal, masked);
  scalar.run(Isa::scalar);
  scalar.check();
  for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    Case other(dtype, block, tokens, width, causal, masked);
    other.run(isa);
    expect_same(other, scalar, isa);
  }
}

// The last key is NaN, and no row but the last one sees it.
void test_not_finite() {
  Case clean(Dtype::float32, 16, 33, 5, true, true), spoiled = clean;
  for (Elements* each : {&spoiled.k, &spoiled.v}) {
    for (int64_t i = 0; i < 5; ++i) each->set(32 * 5 + i, NAN);
  }
  for (Elements* each : {&spoiled.q, &spoiled.grad}) {
    for (int64_t i = 0; i < 5; ++i) each->set(32 * 5 + i, NAN), each->set(65 * 5 + i, NAN);
  }
  clean.run(dsx::current_isa());
  spoiled.run(dsx::current_isa());
  for (int64_t i = 0; i < 32 * 5; ++i) {
    expect(clean.out[i] == spoiled.out[i], "out %ld", long(i));
    expect(clean.grad_q[i] == spoiled.grad_q[i], "grad_q %ld", long(i));
  }
}

}  // namespace

int main() {
  for (Dtype dtype : kDtypes) {
    test_case(dtype, 16, 70, 20, false, true);
    test_case(dtype, 32, 33, 1, true, false);
  }
  test_case(Dtype::float32, 64, 70, 17, true, true);
  test_case(Dtype::float32, 128, 200, 33, false, false);
  test_case(Dtype::float32, 16, 1, 256, false, false);
  test_not_finite();
  return finish();
}
