// Tests skinny_linear_cpu.cpp in every ISA that this CPU has: rows that end where memory ends,
// against double, and bit for bit against the scalar ISA, however the columns are cut.
#include "transformer/skinny_linear.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "expect.h"

namespace {

using dsx::Activation;
using dsx::Dtype;
using dsx::Isa;

struct Storage {
  Elements elements;

  Storage(Dtype dtype, int64_t n, float seed, float scale) : elements(dtype, n) {
    for (int64_t i = 0; i < n; ++i) elements.set(i, scale * std::sin(seed + float(i) * 0.73f));
  }
  dsx::Rows rows(int64_t pitch) { return {elements.address(), pitch, elements.dtype()}; }
  double at(int64_t i) const { return double(elements[i]); }
};

struct Case {
  int64_t rows, columns, length;
  bool gated;
  Storage x, weight, bias, residual, out;

  Case(Dtype dtype, int64_t m, int64_t n, int64_t k, bool is_gated)
      : rows(m),
        columns(n),
        length(k),
        gated(is_gated),
        x(dtype, m * k, 0, 1),
        weight(dtype, 2 * n * k, 1, 1 / std::sqrt(float(k + 1))),
        bias(dtype, 2 * n, 2, 1),
        residual(dtype, m * n, 3, 1),
        out(dtype, m * n, 4, 1) {}

  std::vector<float> run(Isa isa, int64_t cut) {
    dsx::SkinnyLinear call = {};
    call.rows = rows, call.columns = columns, call.length = length;
    call.activated = call.gated = gated;
    call.activation = Activation::relu;
    call.x = x.rows(length), call.weight = weight.rows(length), call.out = out.rows(columns);
    if (gated) call.bias = bias.rows(0), call.residual = residual.rows(columns);
    skinny_linear_cpu(isa, call, 0, cut);
    skinny_linear_cpu(isa, call, cut, columns);
    std::vector<float> found;
    for (int64_t i = 0; i < rows * columns; ++i) found.push_back(out.elements[i]);
    return found;
  }

  double sum(int64_t row, int64_t column) const {
    double total = gated ? bias.at(column) : 0;
    for (int64_t k = 0; k < length; ++k) {
      total += x.at(row * length + k) * weight.at(column * length + k);
    }
    return total;
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
  }
};

void test(Dtype dtype, int64_t m, int64_t n, int64_t k, bool gated) {
  Case scalar(dtype, m, n, k, gated);
  const std::vector<float> want = scalar.run(Isa::scalar, n);
  scalar.check(want);
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    Case other(dtype, m, n, k, gated);
    const std::vector<float> got = other.run(isa, n / 3);
    expect(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0,
           "%s: other bits for %ld x %ld x %ld", name_of(isa), long(m), long(n), long(k));
  }
}

}  // namespace

int main() {
  for (Dtype dtype : kDtypes) {
    for (int64_t m : {1, 4, 7}) {
      for (int64_t k : {0, 1, 16, 33}) test(dtype, m, 5, k, k % 2 == 1);
    }
    test(dtype, 64, 70, 19, true);
    test(dtype, 1, 67, 40, false);
  }
  test(Dtype::bfloat16, 2, 4, 4096 + 21, false);
  return finish();
}
