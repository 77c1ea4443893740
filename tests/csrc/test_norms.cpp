// Tests norm_cpu.cpp, of both kinds, in every ISA that this CPU has: rows that end where memory
// ends, against double, and bit for bit against the scalar ISA; mixtures of storage types; rows cut
// into ranges, and rows in groups.
#include <cmath>
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "expect.h"
#include "norm/norm.h"

namespace {

using dsx::Dtype;
using dsx::Isa;

constexpr int64_t kRows = 70;  // more than two groups
constexpr float kEps = 1e-5f, kOffset = 0.5f;

struct Storage {
  Elements elements;
  int64_t count;

  Storage(Dtype dtype, int64_t n, float seed) : elements(dtype, n), count(n) {
    for (int64_t i = 0; i < n; ++i) elements.set(i, std::sin(seed + float(i) * 0.73f));
  }
  dsx::Rows rows(int64_t pitch) { return {elements.address(), pitch, elements.dtype()}; }
  double operator[](int64_t i) const { return double(elements[i]); }
};

struct Dtypes {
  Dtype x, residual, vectors;
};

template <class Kind>
struct Case {
  Dtypes dtypes;
  int64_t n;
  Storage x, residual, x_bias, weight, bias, grad_out, grad_sum;        // inputs
  Storage sum, out, last, grad_x, grad_weight, grad_bias, grad_x_bias;  // results
  std::vector<float> partials[3];

  Case(Dtypes of, int64_t length)
      : dtypes(of),
        n(length),
        x(of.x, kRows * n, 0),
        residual(of.residual, kRows * n, 1),
        x_bias(of.vectors, n, 2),
        weight(of.vectors, n, 3),
        bias(of.vectors, n, 4),
        grad_out(of.x, kRows * n, 5),
        grad_sum(of.residual, kRows * n, 6),
        sum(of.residual, kRows * n, 7),
        out(of.x, kRows * n, 8),
        last(of.x, kRows * n, 9),
        grad_x(of.residual, kRows * n, 10),
        grad_weight(of.vectors, n, 11),
        grad_bias(of.vectors, n, 12),
        grad_x_bias(of.vectors, n, 13) {
    for (auto& each : partials) each.resize(size_t(groups() * n));
  }

  static int64_t groups() { return dsx::ceil_div(kRows, dsx::rows_of_group(kRows)); }

  void run(Isa isa, int64_t cut) {
    dsx::Norm norm = {};
    norm.rows = kRows;
    norm.length = n;
    norm.x = x.rows(n);
    norm.x.group = 7;  // as good as one
    norm.x.group_pitch = 7 * n;
    norm.residual = residual.rows(n);
    norm.x_bias = x_bias.rows(0);
    norm.sum = sum.rows(n);
    norm.weight = weight.rows(0);
    norm.bias = bias.rows(0);
    norm.out = out.rows(n);
    norm.eps = kEps;
    norm.weight_offset = kOffset;
    dsx::norm_cpu<Kind>(isa, norm, 0, cut);
    dsx::norm_cpu<Kind>(isa, norm, cut, kRows);
    norm.sum = {};
    norm.out = last.rows(n);
    if (dtypes.x == dtypes.residual) dsx::norm_cpu<Kind>(isa, norm, 0, kRows);
    dsx::NormBackward back = {};
    back.rows = kRows;
    back.length = n;
    back.grad_out = grad_out.rows(n);
    back.grad_sum = grad_sum.rows(n);
    back.x = sum.rows(n);
    back.weight = weight.rows(0);
    back.grad_x = grad_x.rows(n);
    back.eps = kEps;
    back.weight_offset = kOffset;
    const dsx::OfVectors<float*> all{partials[0].data(), partials[1].data(), partials[2].data()};
    dsx::norm_backward_cpu<Kind>(isa, back, 0, 1, 0, all);
    dsx::norm_backward_cpu<Kind>(isa, back, 1, groups(), 0, all);
    const int64_t middle = n / 2;
    Storage* const grads[] = {&grad_weight, &grad_bias, &grad_x_bias};
    for (int k = 0; k < 3; ++k) {
      const dsx::Rows grad = grads[k]->rows(0);
      const float* first = partials[k].data();
      std::vector<double> totals(size_t(n), 0.0);
      dsx::add_partials_cpu<Kind>(isa, first, 1, n, 0, n, totals.data(), {});
      const auto add_others = [&](int64_t begin, int64_t end) {
        dsx::add_partials_cpu<Kind>(isa, first + n, groups() - 1, n, begin, end, totals.data(),
                                    grad);
      };
      add_others(0, middle);
      add_others(middle, n);
    }
  }

  std::vector<float> results() const {
    std::vector<float> all;
    for (const Storage* s : {&sum, &out, &last, &grad_x, &grad_weight, &grad_bias, &grad_x_bias}) {
      for (int64_t i = 0; i < s->count; ++i) all.push_back(s->elements[i]);
    }
    return all;
  }

  static double rounding(Dtype dtype) {
    return dtype == Dtype::float32 ? 0x1p-24 : dtype == Dtype::float16 ? 0x1p-11 : 0x1p-8;
  }

  // Of values near 1, and gradients of vectors near the number of rows.
  void compare(const char* what, const Storage& got, int64_t i, double want, double size) const {
    const double bound = size * (1e-5 + 1.1 * rounding(got.elements.dtype()));
    expect(std::fabs(got[i] - want) <= bound, "%s: %s[%ld] of %ld is %g, expected %g", Kind::kOp,
           what, long(i), long(n), got[i], want);
  }

  double mean(const Storage& of, int64_t row) const {
    double total = 0;
    for (int64_t i = 0; i < n; ++i) total += of[row * n + i];
    return Kind::kCentered ? total / double(n) : 0;
  }

  void check() const {
    std::vector<double> of_weight(size_t(n), 0), of_bias(size_t(n), 0), of_x_bias(size_t(n), 0);
    for (int64_t row = 0; row < kRows; ++row) {
      const double middle = mean(sum, row);
      double squares = 0, dot = 0, grads = 0;
      const auto weighted = [&](int64_t i) {
        return grad_out[row * n + i] * (weight[i] + double(kOffset));
      };
      for (int64_t i = 0; i < n; ++i) {
        const int64_t at = row * n + i;
        compare("sum", sum, at, x[at] + x_bias[i] + residual[at], 3);
        squares += (sum[at] - middle) * (sum[at] - middle);
        dot += (sum[at] - middle) * weighted(i);
        grads += Kind::kCentered ? weighted(i) / double(n) : 0;
      }
      const double inverse = 1 / std::sqrt(squares / double(n) + double(kEps));
      const double share = dot / double(n) * inverse * inverse * inverse;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t at = row * n + i;
        const double value = sum[at] - middle;
        const double result = value * inverse * (weight[i] + double(kOffset)) + bias[i];
        compare("out", out, at, result, 6);
        expect(dtypes.x != dtypes.residual || last.elements[at] == out.elements[at],
               "%s: other results without the sum", Kind::kOp);
        const double grad = (weighted(i) - grads) * inverse - value * share + grad_sum[at];
        compare("grad_x", grad_x, at, grad, 6 + 6 * inverse);
        of_weight[size_t(i)] += grad_out[at] * value * inverse;
        of_bias[size_t(i)] += grad_out[at];
        of_x_bias[size_t(i)] += grad;
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      compare("grad_weight", grad_weight, i, of_weight[size_t(i)], 2 * kRows);
      compare("grad_bias", grad_bias, i, of_bias[size_t(i)], kRows);
      compare("grad_x_bias", grad_x_bias, i, of_x_bias[size_t(i)], 8 * kRows);
    }
  }
};

template <class Kind>
void test(Dtypes dtypes, int64_t n) {
  Case<Kind> scalar(dtypes, n);
  scalar.run(Isa::scalar, 33);
  if (n > 1 || !Kind::kCentered) scalar.check();  // a single deviation is 0, and all else rounding
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    Case<Kind> other(dtypes, n);
    other.run(isa, 5);
    const std::vector<float> want = scalar.results(), got = other.results();
    expect(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0,
           "%s: other bits for length %ld with %s", Kind::kOp, long(n), name_of(isa));
  }
}

template <class Kind>
void test_all() {
  for (int64_t n : {1, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 100, 257}) {
    for (Dtype dtype : kDtypes) test<Kind>({dtype, dtype, dtype}, n);
    test<Kind>({Dtype::bfloat16, Dtype::float32, Dtype::float32}, n);
    test<Kind>({Dtype::float16, Dtype::float16, Dtype::bfloat16}, n);
  }
}

}  // namespace

int main() {
  test_all<dsx::RmsNorm>();
  test_all<dsx::LayerNorm>();
  return finish();
}
