// Tests route_cpu.cpp, assign_cpu.cpp and permute_cpu.cpp in every ISA that this CPU has: rows that
// end where memory ends, against double, and bit for bit against the scalar ISA; with every score,
// groups, a bias, drops and choices of no expert.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "dtypes.h"
#include "expect.h"
#include "moe/assign.h"
#include "moe/permute.h"
#include "moe/route.h"

namespace {

using dsx::Dtype;
using dsx::Isa;
using dsx::Score;

constexpr int64_t kTokens = 71;  // more than two tiles

struct Shape {
  int64_t experts, k, groups, topk_groups;
};

struct Tensor {
  Elements elements;
  int64_t count;

  Tensor(Dtype dtype, int64_t n, float seed) : elements(dtype, n), count(n) {
    for (int64_t i = 0; i < n; ++i) elements.set(i, 4 * std::sin(seed + float(i) * 0.73f));
  }
  dsx::Rows rows(int64_t pitch) { return {elements.address(), pitch, elements.dtype()}; }
  float* floats() { return static_cast<float*>(elements.address()); }
  double at(int64_t i) const { return double(elements[i]); }
  std::vector<float> values() const {
    std::vector<float> all;
    for (int64_t i = 0; i < count; ++i) all.push_back(elements[i]);
    return all;
  }
};

struct RouteCase {
  Shape shape;
  dsx::RouteOptions options;
  Tensor logits, bias, weights, sums, z_sum, grad_weights, grad_sums, grad_z, grad;
  std::vector<int64_t> chosen;
  std::vector<float> partials;
  std::vector<double> powers;  // their sum, of each token
  bool has_bias;

  RouteCase(Dtype dtype, Score score, const Shape& of, bool normalize, bool biased)
      : shape(of),
        options{kTokens, of.experts, of.k, score, normalize, 2.5f},
        logits(dtype, kTokens * of.experts, 0),
        bias(dtype, of.experts, 1),
        weights(Dtype::float32, kTokens * of.k, 2),
        sums(Dtype::float32, of.experts, 3),
        z_sum(Dtype::float32, 1, 4),
        grad_weights(Dtype::float32, kTokens * of.k, 5),
        grad_sums(Dtype::float32, of.experts, 6),
        grad_z(Dtype::float32, 1, 7),
        grad(dtype, kTokens * of.experts, 8),
        chosen(size_t(kTokens * of.k)),
        partials(size_t(tiles() * (of.experts + 1))),
        powers(size_t(kTokens)),
        has_bias(biased) {
    for (int64_t i = 0; i < logits.count; ++i) {
      powers[size_t(i / shape.experts)] += std::exp(logits.at(i));
    }
  }

  static int64_t tiles() { return dsx::ceil_div(kTokens, dsx::tokens_of_tile(kTokens)); }

  void run(Isa isa, int64_t cut) {
    dsx::Route call = {};
    call.options = options;
    call.groups = shape.groups;
    call.topk_groups = shape.topk_groups;
    call.logits = logits.rows(shape.experts);
    if (has_bias) call.bias = bias.rows(0);
    call.chosen = chosen.data();
    call.weights = weights.floats();
    call.partials = partials.data();
    call.probability_sums = sums.floats();
    call.z_sum = z_sum.floats();
    route_cpu(isa, call, 0, cut);
    route_cpu(isa, call, cut, tiles());
    add_tiles_cpu(call);
    dsx::RouteBackward back = {};
    back.options = options;
    back.logits = call.logits;
    back.chosen = chosen.data();
    back.grad_weights = grad_weights.floats();
    back.grad_probability_sums = grad_sums.floats();
    back.grad_z_sum = grad_z.floats();
    back.grad_logits = grad.rows(shape.experts);
    route_backward_cpu(isa, back, 0, cut);
    route_backward_cpu(isa, back, cut, kTokens);
  }

  double logit(int64_t token, int64_t e) const { return logits.at(token * shape.experts + e); }
  double probability(int64_t token, int64_t e) const {
    return std::exp(logit(token, e)) / powers[size_t(token)];
  }
  double score(int64_t token, int64_t e) const {
    if (options.score == Score::sigmoid) return 1 / (1 + std::exp(-logit(token, e)));
    return options.score == Score::softmax ? probability(token, e) : logit(token, e);
  }
  double ranked(int64_t token, int64_t e) const {
    return score(token, e) + (has_bias ? bias.at(e) : 0);
  }

  // Choices are different, in groups as many as there may be, and no worse than those left out.
  void check_choices(int64_t token) const {
    const int64_t* mine = chosen.data() + token * shape.k;
    const int64_t length = shape.experts / shape.groups;
    std::vector<bool> is_taken(size_t(shape.experts)), is_group(size_t(shape.groups));
    for (int64_t j = 0; j < shape.k; ++j) {
      const bool is_new = mine[j] >= 0 && mine[j] < shape.experts && !is_taken[size_t(mine[j])];
      expect(is_new, "choice %ld of token %ld is %ld", long(j), long(token), long(mine[j]));
      if (!is_new) return;
      is_taken[size_t(mine[j])] = is_group[size_t(mine[j] / length)] = true;
      if (j == 0) continue;
      expect(ranked(token, mine[j - 1]) >= ranked(token, mine[j]) - 1e-6, "choice %ld is better",
             long(j));
    }
    expect(std::count(is_group.begin(), is_group.end(), true) <= shape.topk_groups, "groups");
    const double worst = ranked(token, mine[shape.k - 1]);
    for (int64_t e = 0; e < shape.experts; ++e) {
      if (is_taken[size_t(e)] || !is_group[size_t(e / length)]) continue;
      expect(ranked(token, e) <= worst + 1e-6, "%ld is left out", long(e));
    }
  }

  double unscaled(int64_t token, int64_t j) const {
    const int64_t* mine = chosen.data() + token * shape.k;
    if (options.score != Score::softmax_topk) return score(token, mine[j]);
    double sum = 0;
    for (int64_t i = 0; i < shape.k; ++i) sum += std::exp(logit(token, mine[i]));
    return std::exp(logit(token, mine[j])) / sum;
  }

  void check() const {
    for (int64_t token = 0; token < kTokens; ++token) {
      check_choices(token);
      double sum = 0;
      for (int64_t j = 0; j < shape.k; ++j) sum += unscaled(token, j);
      for (int64_t j = 0; j < shape.k; ++j) {
        const double want = 2.5 * unscaled(token, j) / (options.normalize ? sum : 1);
        const double got = weights.at(token * shape.k + j);
        expect(std::fabs(got - want) <= 2e-6 * want, "weight is %g, expected %g", got, want);
      }
      for (int64_t e = 0; e < shape.experts; ++e) {
        expect(std::isfinite(grad.at(token * shape.experts + e)), "gradient");
      }
    }
    double all = 0;
    for (int64_t e = 0; e < shape.experts; ++e) all += sums.at(e);
    expect(std::fabs(all - double(kTokens)) <= 1e-4, "probabilities add up to %g", all);
  }
};

void test_route(Dtype dtype, const Shape& shape) {
  for (Score score : {Score::softmax, Score::sigmoid, Score::softmax_topk}) {
    for (int way = 0; way < 4; ++way) {
      RouteCase scalar(dtype, score, shape, way % 2 != 0, way / 2 != 0);
      scalar.run(Isa::scalar, 1);
      scalar.check();
      for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
        if (isa > dsx::current_isa()) break;
        RouteCase other(dtype, score, shape, way % 2 != 0, way / 2 != 0);
        other.run(isa, 2);
        const bool same = other.chosen == scalar.chosen &&
                          other.weights.values() == scalar.weights.values() &&
                          other.sums.values() == scalar.sums.values() &&
                          other.z_sum.values() == scalar.z_sum.values() &&
                          other.grad.values() == scalar.grad.values();
        expect(same, "%s: other bits for %ld experts", name_of(isa), long(shape.experts));
      }
    }
  }
}

struct Assigned {
  std::vector<int64_t> experts, slots, counts, first_counts;
  std::vector<int32_t> offsets;
  int64_t k, rows;

  Assigned(int64_t tokens, int64_t of_k, int64_t num_experts, int64_t capacity, const int64_t* seed)
      : experts(size_t(tokens * of_k)),
        slots(experts.size()),
        counts(size_t(num_experts)),
        first_counts(counts.size()),
        offsets(counts.size()),
        k(of_k),
        rows(std::min(tokens * k, num_experts * capacity)) {
    for (size_t i = 0; i < experts.size(); ++i) {
      experts[i] = int64_t(i * i % size_t(num_experts + 1));  // the last one is none
    }
    dsx::Assign call = {};
    call.tokens = tokens;
    call.k = k;
    call.num_experts = num_experts;
    call.capacity = capacity;
    call.experts = experts.data();
    call.seed = seed;
    call.slots = slots.data();
    call.offsets = offsets.data();
    call.counts = counts.data();
    call.first_counts = first_counts.data();
    assign_cpu(call);
  }

  // Each row up to the end is some choice's, of the expert that the row belongs to.
  void check(int64_t capacity) const {
    std::vector<int> owners(static_cast<size_t>(rows));
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] < 0) continue;
      const bool is_row = slots[i] < rows && experts[i] < int64_t(offsets.size());
      expect(is_row, "slot %zu is %ld", i, long(slots[i]));
      if (!is_row) continue;
      ++owners[size_t(slots[i])];
      const size_t e = size_t(experts[i]);
      expect(slots[i] < offsets[e] && (e == 0 || slots[i] >= offsets[e - 1]), "another's row");
    }
    for (int64_t row = 0; row < rows; ++row) {
      expect(owners[size_t(row)] == (row < offsets.back()), "row %ld", long(row));
    }
    int64_t end = 0;
    for (size_t e = 0; e < offsets.size(); ++e) {
      end += std::min(counts[e], capacity);
      expect(offsets[e] == end, "offset %zu is %d", e, offsets[e]);
    }
  }
};

void test_assign() {
  const int64_t seed = 11;
  for (int64_t tokens : {0, 1, 7, 64, 1000}) {
    for (int64_t capacity : {0, 3, 5000}) {
      for (const int64_t* order : {static_cast<const int64_t*>(nullptr), &seed}) {
        for (int64_t k : {1, 3}) Assigned(tokens, k, 5, capacity, order).check(capacity);
      }
    }
  }
  for (int64_t tokens : {1, 2, 5, 16, 17, 1025}) {
    std::vector<int64_t> order(static_cast<size_t>(tokens));
    for (size_t i = 0; i < order.size(); ++i) {
      order[i] = dsx::TokenOrder(tokens, seed).token_at(int64_t(i));
    }
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < order.size(); ++i) expect(order[i] == int64_t(i), "a token twice");
  }
}

struct PermuteCase {
  int64_t n;
  Assigned assigned;
  Tensor x, rows, out, weights, grad_rows, grad_weights;

  PermuteCase(Dtype dtype, int64_t length)
      : n(length),
        assigned(kTokens, 3, 5, 30, nullptr),
        x(dtype, kTokens * n, 0),
        rows(dtype, assigned.rows * n, 1),
        out(dtype, kTokens * n, 2),
        weights(Dtype::bfloat16, kTokens * 3, 3),
        grad_rows(dtype, assigned.rows * n, 4),
        grad_weights(Dtype::float32, kTokens * 3, 5) {}

  void run(Isa isa, int64_t cut) {
    const dsx::Slots slots{kTokens, 3, assigned.rows, assigned.slots.data(),
                           &assigned.offsets.back()};
    const dsx::Permute there{slots, n, x.rows(n), rows.rows(n)};
    permute_cpu(isa, there, 0, cut);
    permute_cpu(isa, there, cut, kTokens);
    clear_rows_cpu(slots, there.out, n);
    const dsx::Unpermute back{slots, n, rows.rows(n), weights.rows(1), out.rows(n)};
    unpermute_cpu(isa, back, 0, cut);
    unpermute_cpu(isa, back, cut, kTokens);
    const dsx::UnpermuteBackward gradients{slots,
                                           n,
                                           x.rows(n),
                                           rows.rows(n),
                                           weights.rows(1),
                                           grad_rows.rows(n),
                                           grad_weights.rows(1)};
    unpermute_backward_cpu(isa, gradients, 0, cut);
    unpermute_backward_cpu(isa, gradients, cut, kTokens);
    clear_rows_cpu(slots, gradients.grad_y, n);
  }

  void check() const {
    const double rounding = x.elements.dtype() == Dtype::float32 ? 0x1p-22 : 0x1p-7;
    for (int64_t token = 0; token < kTokens; ++token) {
      double weight = 0, square = 0;
      for (int64_t i = 0; i < n; ++i) square += x.at(token * n + i) * x.at(token * n + i);
      for (int64_t j = token * 3; j < token * 3 + 3; ++j) {
        const int64_t slot = assigned.slots[size_t(j)];
        if (slot >= 0) weight += weights.at(j);
        const double want = slot >= 0 ? square : 0;
        expect(std::fabs(grad_weights.at(j) - want) <= 1e-5 * square, "gradient of a weight is %g",
               grad_weights.at(j));
        for (int64_t i = 0; slot >= 0 && i < n; ++i) {
          const double value = x.at(token * n + i);
          expect(rows.at(slot * n + i) == value, "row %ld", long(slot));
          expect(std::fabs(grad_rows.at(slot * n + i) - value * weights.at(j)) <= 20 * rounding,
                 "gradient of row %ld", long(slot));
        }
      }
      for (int64_t i = 0; i < n; ++i) {
        expect(std::fabs(out.at(token * n + i) - weight * x.at(token * n + i)) <= 60 * rounding,
               "out is %g, expected %g", out.at(token * n + i), weight * x.at(token * n + i));
      }
    }
    for (int64_t i = assigned.offsets.back() * n; i < assigned.rows * n; ++i) {
      expect(rows.at(i) == 0 && grad_rows.at(i) == 0, "a row that is nobody's");
    }
  }
};

void test_permute(Dtype dtype, int64_t n) {
  PermuteCase scalar(dtype, n);
  scalar.run(Isa::scalar, 5);
  scalar.check();
  for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    PermuteCase other(dtype, n);
    other.run(isa, 70);
    const bool same = other.rows.values() == scalar.rows.values() &&
                      other.out.values() == scalar.out.values() &&
                      other.grad_rows.values() == scalar.grad_rows.values() &&
                      other.grad_weights.values() == scalar.grad_weights.values();
    expect(same, "%s: other bits for rows of %ld", name_of(isa), long(n));
  }
}

}  // namespace

int main() {
  const Shape shapes[] = {{8, 2, 1, 1},  {1, 1, 1, 1},   {33, 33, 1, 1},
                          {64, 6, 8, 3}, {100, 4, 1, 1}, {1024, 40, 32, 2}};
  for (Dtype dtype : kDtypes) {
    for (const Shape& shape : shapes) {
      if (dtype == Dtype::float32 || shape.experts < 1024) test_route(dtype, shape);
    }
    for (int64_t n : {1, 7, 16, 31, 100}) test_permute(dtype, n);
  }
  test_assign();
  return finish();
}
