// Tests skinny_linear_cpu.cpp in every ISA that this CPU has: rows that end where memory ends,
// against double, and bit for bit against the scalar ISA, however the columns are cut.
#include "linear/skinny_linear.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "expect.h"

namespace {

using dsx::Activation;
using dsx::Dtype;
using dsx::Isa;
using dsx::kSquared;

struct Storage {
  Elements elements;

  Storage(Dtype dtype, int64_t n, float seed, float scale) : elements(dtype, n) {
    for (int64_t i = 0; i < n; ++i) elements.set(i, scale * std::sin(seed + float(i) * 0.73f));
  }
  dsx::Rows rows(int64_t pitch) { return {elements.address(), pitch, elements.dtype()}; }
  double at(int64_t i) const { return double(elements[i]); }
};

enum class Form { plain, gated, norms };  // the last one with a norm before it and one after

struct Case {
  int64_t rows, columns, length;
  Form form;
  bool gated;
  Storage x, weight, bias, residual, out, norm_weight, scaled, squares, out_squares;

  Case(Dtype dtype, int64_t m, int64_t n, int64_t k, Form made)
      : rows(m),
        columns(n),
        length(k),
        form(made),
        gated(made == Form::gated),
        x(dtype, m * k, 0, 1),
        weight(dtype, 2 * n * k, 1, 1 / std::sqrt(float(k + 1))),
        bias(dtype, 2 * n, 2, 1),
        residual(dtype, m * n, 3, 1),
        out(dtype, m * n, 4, 1),
        norm_weight(dtype, n, 5, 1),
        scaled(dtype, m * n, 6, 1),
        squares(Dtype::float32, m * (k / kSquared), 7, 1),
        out_squares(Dtype::float32, m * (n / kSquared), 8, 1) {
    for (int64_t i = 0; i < m * (k / kSquared); ++i) squares.elements.set(i, 2 * kSquared);
  }

  std::vector<float> run(Isa isa, int64_t cut) {
    dsx::SkinnyLinear call = {};
    call.rows = rows, call.columns = columns, call.length = length;
    call.activated = call.gated = gated;
    call.activation = Activation::relu;
    call.x = x.rows(length), call.weight = weight.rows(length), call.out = out.rows(columns);
    if (gated) call.bias = bias.rows(0), call.residual = residual.rows(columns);
    if (form == Form::norms) {
      call.squares = squares.rows(length / kSquared), call.eps = 2;  // the root of 4 divides
      call.norm_weight = norm_weight.rows(0), call.weight_offset = 1;
      call.scaled = scaled.rows(columns), call.out_squares = out_squares.rows(columns / kSquared);
      cut = cut / kSquared * kSquared;
    }
    skinny_linear_cpu(isa, call, 0, cut);
    skinny_linear_cpu(isa, call, cut, columns);
    std::vector<float> found;
    for (int64_t i = 0; i < rows * columns; ++i) found.push_back(out.elements[i]);
    if (form != Form::norms) return found;
    for (int64_t i = 0; i < rows * columns; ++i) found.push_back(scaled.elements[i]);
    for (int64_t i = 0; i < rows * (columns / kSquared); ++i) {
      found.push_back(out_squares.elements[i]);
    }
    return found;
  }

  double sum(int64_t row, int64_t column) const {
    double total = gated ? bias.at(column) : 0;
    for (int64_t k = 0; k < length; ++k) {
      total += x.at(row * length + k) * weight.at(column * length + k);
    }
    return form == Form::norms ? total / 2 : total;
  }

  void check(const std::vector<float>& got) const {
    const Dtype dtype = out.elements.dtype();
    const double rounding = dtype == Dtype::float32   ? 0x1p-24
                            : dtype == Dtype::float16 ? 0x1p-11
                                                      : 0x1p-8;
    for (int64_t i = 0; i < rows * columns; ++i) {
      double want = sum(i / columns, i % columns);
      if (gated) {
        want = std::fmax(want, 0) * sum(i / columns, columns + i % columns) + residual.at(i);
      }
      const double bound = (1 + std::fabs(want)) * (2e-5 + 1.1 * rounding);
      expect(std::fabs(double(got[size_t(i)]) - want) <= bound,
             "[%ld] of %ld x %ld x %ld is %g, expected %g", long(i), long(rows), long(columns),
             long(length), double(got[size_t(i)]), want);
    }
    if (form == Form::norms) check_norm(got, rounding);
  }

  void check_norm(const std::vector<float>& got, double rounding) const {
    const float* const found = got.data() + rows * columns;
    for (int64_t i = 0; i < rows * columns; ++i) {
      const double want = out.at(i) * (norm_weight.at(i % columns) + 1);
      expect(std::fabs(double(found[i]) - want) <= (1.1 * rounding + 0x1p-22) * std::fabs(want),
             "scaled [%ld] is %g, expected %g", long(i), double(found[i]), want);
    }
    for (int64_t i = 0; i < rows * columns / kSquared; ++i) {
      double want = 0;
      for (int64_t k = 0; k < kSquared; ++k) want += std::pow(out.at(i * kSquared + k), 2);
      const double sum = double(found[rows * columns + i]);
      expect(std::fabs(sum - want) <= 1e-6 * want, "sum [%ld] of squares is %g, expected %g",
             long(i), sum, want);
    }
  }
};

void test(Dtype dtype, int64_t m, int64_t n, int64_t k, Form form) {
  Case scalar(dtype, m, n, k, form);
  const std::vector<float> want = scalar.run(Isa::scalar, n);
  scalar.check(want);
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    Case other(dtype, m, n, k, form);
    const std::vector<float> got = other.run(isa, n / 3);
    expect(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0,
           "%s: other bits for %ld x %ld x %ld", name_of(isa), long(m), long(n), long(k));
  }
}

}  // namespace

int main() {
  for (Dtype dtype : kDtypes) {
    for (int64_t m : {1, 4, 7}) {
      for (int64_t k : {0, 1, 16, 33}) test(dtype, m, 5, k, k % 2 ? Form::gated : Form::plain);
      if (dtype != Dtype::float16) test(dtype, m, 8 * m, 40, Form::norms);
    }
    test(dtype, 64, 70, 19, Form::gated);
    test(dtype, 1, 67, 40, Form::plain);
  }
  test(Dtype::bfloat16, 2, 4, 4096 + 21, Form::plain);
  test(Dtype::bfloat16, 2, 200, 4096 + 24, Form::norms);
  return finish();
}
