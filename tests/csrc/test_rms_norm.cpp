// Tests rms_norm_cpu.cpp in every ISA that this CPU has: rows that end where memory ends, against
// double, and bit for bit against the scalar ISA; mixtures of storage types; rows cut into ranges.
#include <cmath>
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "expect.h"
#include "transformer/rms_norm.h"

namespace {

using dsx::Dtype;
using dsx::Isa;

constexpr int64_t kRows = 70;  // more than two groups
constexpr float kEps = 1e-5f;

struct Storage {
  Elements elements;
  int64_t count;

  Storage(Dtype dtype, int64_t n, float seed) : elements(dtype, n), count(n) {
    for (int64_t i = 0; i < n; ++i) elements.set(i, std::sin(seed + float(i) * 0.73f));
  }
  dsx::Rows rows(int64_t pitch) { return {elements.address(), pitch, elements.dtype()}; }
};

struct Dtypes {
  Dtype x, residual, weight;
};

struct Case {
  Dtypes dtypes;
  int64_t n;
  Storage x, residual, weight, grad_out, grad_sum;  // inputs
  Storage sum, out, grad_x, grad_weight;            // results
  std::vector<float> partials;

  Case(Dtypes of, int64_t length)
      : dtypes(of),
        n(length),
        x(of.x, kRows * n, 0),
        residual(of.residual, kRows * n, 1),
        weight(of.weight, n, 2),
        grad_out(of.x, kRows * n, 3),
        grad_sum(of.residual, kRows * n, 4),
        sum(of.residual, kRows * n, 5),
        out(of.x, kRows * n, 6),
        grad_x(of.residual, kRows * n, 7),
        grad_weight(of.weight, n, 8),
        partials(size_t((kRows + dsx::kRowsOfPartial - 1) / dsx::kRowsOfPartial * n)) {}

  void run(Isa isa, int64_t cut) {
    dsx::RmsNorm norm = {};
    norm.rows = kRows;
    norm.length = n;
    norm.x = x.rows(n);
    norm.residual = residual.rows(n);
    norm.sum = sum.rows(n);
    norm.weight = weight.rows(0);
    norm.out = out.rows(n);
    norm.eps = kEps;
    rms_norm_cpu(isa, norm, 0, cut);
    rms_norm_cpu(isa, norm, cut, kRows);
    dsx::RmsNormBackward back = {};
    back.rows = kRows;
    back.length = n;
    back.grad_out = grad_out.rows(n);
    back.grad_sum = grad_sum.rows(n);
    back.x = sum.rows(n);
    back.weight = weight.rows(0);
    back.grad_x = grad_x.rows(n);
    back.eps = kEps;
    const int64_t groups = (kRows + dsx::kRowsOfPartial - 1) / dsx::kRowsOfPartial;
    rms_norm_backward_cpu(isa, back, 0, 1, partials.data());
    rms_norm_backward_cpu(isa, back, 1, groups, partials.data());
    const int64_t middle = n / 2;
    add_partials_cpu(isa, partials.data(), groups, n, 0, middle, grad_weight.rows(0));
    add_partials_cpu(isa, partials.data(), groups, n, middle, n, grad_weight.rows(0));
  }

  std::vector<float> results() const {
    std::vector<float> all;
    for (const Storage* s : {&sum, &out, &grad_x, &grad_weight}) {
      for (int64_t i = 0; i < s->count; ++i) all.push_back(s->elements[i]);
    }
    return all;
  }

  static double rounding(Dtype dtype) {
    return dtype == Dtype::float32 ? 0x1p-24 : dtype == Dtype::float16 ? 0x1p-11 : 0x1p-8;
  }

  // Of values near 1, and weight gradients near the number of rows.
  void compare(const char* what, const Storage& got, int64_t i, double want, double size) const {
    const double bound = size * (1e-5 + 1.1 * rounding(got.elements.dtype()));
    expect(std::fabs(double(got.elements[i]) - want) <= bound, "%s[%ld] of %ld is %g, expected %g",
           what, long(i), long(n), double(got.elements[i]), want);
  }

  void check() const {
    std::vector<double> weight_grads(size_t(n), 0);
    for (int64_t row = 0; row < kRows; ++row) {
      double squares = 0, dot = 0;
      for (int64_t i = row * n; i < row * n + n; ++i) {
        compare("sum", sum, i, double(x.elements[i]) + double(residual.elements[i]), 2);
        squares += double(sum.elements[i]) * double(sum.elements[i]);
        dot += double(sum.elements[i]) * double(grad_out.elements[i]) *
               double(weight.elements[i - row * n]);
      }
      const double inverse = 1 / std::sqrt(squares / double(n) + double(kEps));
      for (int64_t i = row * n; i < row * n + n; ++i) {
        const double value = double(sum.elements[i]), w = double(weight.elements[i - row * n]);
        const double grad = double(grad_out.elements[i]);
        compare("out", out, i, value * inverse * w, 4);
        const double of_x =
            grad * w * inverse - value * dot / double(n) * inverse * inverse * inverse;
        compare("grad_x", grad_x, i, of_x + double(grad_sum.elements[i]), 4 + 2 * inverse);
        weight_grads[size_t(i - row * n)] += grad * value * inverse;
      }
    }
    for (int64_t i = 0; i < n; ++i)
      compare("grad_weight", grad_weight, i, weight_grads[size_t(i)], kRows);
  }
};

void test(Dtypes dtypes, int64_t n) {
  Case scalar(dtypes, n);
  scalar.run(Isa::scalar, 33);
  scalar.check();
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    Case other(dtypes, n);
    other.run(isa, 5);
    const std::vector<float> want = scalar.results(), got = other.results();
    expect(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0,
           "%s: other bits for length %ld", name_of(isa), long(n));
  }
}

}  // namespace

int main() {
  for (int64_t n : {1, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 100, 257}) {
    for (Dtype dtype : kDtypes) test({dtype, dtype, dtype}, n);
    test({Dtype::bfloat16, Dtype::float32, Dtype::float32}, n);
    test({Dtype::float16, Dtype::float16, Dtype::bfloat16}, n);
  }
  return finish();
}
