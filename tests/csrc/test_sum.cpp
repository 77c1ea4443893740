// Tests common/simd/sum.inl in every ISA that this CPU has: the bits of its definition, written
// out in plain C++, for every number of elements up to several rows of 16.
#include <algorithm>
#include <cmath>
#include <vector>

#include "expect.h"

#define DSX_KERNEL_SOURCE "sum_loops.inl"
#include "common/simd/foreach_isa.h"

namespace {

using dsx::Isa;

double added_in_order(const std::vector<double>& values) {
  double lanes[16] = {};
  for (size_t i = 0; i < values.size(); ++i) lanes[i % 16] += values[i];
  for (int half : {8, 4, 2, 1}) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// Values whose sum depends on the order that they are added in.
std::vector<float> values_of(int64_t n, float scale) {
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = scale * std::sin(float(i + 1)) * float(1 + i % 97);
  return values;
}

void test(Isa isa, const std::vector<float>& values) {
  const int64_t n = int64_t(values.size());
  std::vector<double> wide(values.begin(), values.end());
  const double sum = DSX_DISPATCH_ISA(isa, plain_sum(values.data(), n));
  expect(sum == added_in_order(wide), "%s: the sum of %ld is %a, expected %a", name_of(isa),
         long(n), sum, added_in_order(wide));
  for (double& value : wide) value *= value;
  const double squares = DSX_DISPATCH_ISA(isa, sum_of_squares(values.data(), n));
  expect(squares == added_in_order(wide), "%s: the sum of squares of %ld is %a, expected %a",
         name_of(isa), long(n), squares, added_in_order(wide));
}

void test_not_finite(Isa isa, float value) {
  for (size_t at : {size_t(0), size_t(15), size_t(38)}) {
    std::vector<float> values = values_of(39, 1);
    values[at] = value;
    const double sum = DSX_DISPATCH_ISA(isa, sum_of_squares(values.data(), 39));
    expect(!std::isfinite(sum), "%s: with %g at %zu the sum of squares is %g", name_of(isa),
           double(value), at, sum);
  }
}

}  // namespace

int main() {
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    for (int64_t n = 0; n < 70; ++n) test(isa, values_of(n, 1));
    for (float scale : {1e36f, 1e-40f, 1e-3f}) test(isa, values_of(1000, scale));
    for (float value : {INFINITY, -INFINITY, NAN}) test_not_finite(isa, value);
  }
  return finish();
}
