// Tests exp, sigmoid and rsqrt of Vec against double, within the bounds that vec_math.inl states,
// and bit for bit between the ISAs: for every 1021st float and all near 0, 1 and the ends of the
// range; for every float if the program is started with the argument "all" (some minutes).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "expect.h"

#define DSX_KERNEL_SOURCE "vec_functions.inl"
#include "common/simd/foreach_isa.h"

namespace {

using dsx::Isa;

constexpr int kBlock = 4096;

struct Function {
  const char* name;
  void (*run)(Isa isa, const float* source, float* result, int n);
  double (*right)(double);
  double bound;        // in units of the last place
  double least_right;  // below it, in magnitude, 0 will do
};

#define RUN(name)                                          \
  [](Isa isa, const float* source, float* result, int n) { \
    DSX_DISPATCH_ISA(isa, all_##name(source, result, n));  \
  }

const Function kFunctions[] = {
    {"exp", RUN(exp), [](double a) { return std::exp(a); }, 1.1, 0},
    {"sigmoid", RUN(sigmoid), [](double a) { return 1 / (1 + std::exp(-a)); }, 2.6, 0x1p-126},
    {"rsqrt", RUN(rsqrt), [](double a) { return 1 / std::sqrt(a); }, 1.5, 0},
};

// The distance of floats near `value`.
double last_place(double value) {
  if (value == 0) return 0x1p-149;
  return std::max(std::ldexp(1.0, std::ilogb(value) - 23), 0x1p-149);
}

double worst[3];

void test_block(const std::vector<float>& source) {
  std::vector<float> scalar(source.size()), result(source.size());
  const int n = int(source.size());
  for (size_t f = 0; f < std::size(kFunctions); ++f) {
    const Function& function = kFunctions[f];
    function.run(Isa::scalar, source.data(), scalar.data(), n);
    for (int i = 0; i < n; ++i) {
      const double want = function.right(double(source[size_t(i)]));
      const double got = double(scalar[size_t(i)]);
      bool right = std::isnan(want) ? std::isnan(got) : got == want || got == double(float(want));
      if (!right && std::isfinite(want) && std::isfinite(got)) {
        const double error = std::fabs(got - want) / last_place(want);
        right = error <= function.bound || (got == 0 && std::fabs(want) < function.least_right);
        if (std::fabs(want) >= function.least_right) worst[f] = std::max(worst[f], error);
      }
      // The largest float and infinity are neighbours.
      if (std::isinf(got) != std::isinf(want)) right |= std::fabs(want) > 3.4028234e38;
      expect(right, "%s of %a is %a, expected %a", function.name, double(source[size_t(i)]), got,
             want);
    }
    for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
      if (isa > dsx::current_isa()) break;
      function.run(isa, source.data(), result.data(), n);
      for (int i = 0; i < n; ++i) {
        const float a = scalar[size_t(i)], b = result[size_t(i)];
        expect(dsx::bits_of(a) == dsx::bits_of(b) || (std::isnan(a) && std::isnan(b)),
               "%s: %s of %a is %a, expected %a", name_of(isa), function.name,
               double(source[size_t(i)]), double(b), double(a));
      }
    }
  }
}

// Every `step`-th of the floats with these bits, and their negatives.
void test_range(uint64_t first, uint64_t last, uint64_t step) {
  std::vector<float> block;
  for (uint64_t bits = first; bits <= last; bits += step) {
    block.push_back(dsx::float_of(uint32_t(bits)));
    block.push_back(dsx::float_of(uint32_t(bits) | 0x80000000u));
    if (block.size() >= kBlock) {
      test_block(block);
      block.clear();
    }
  }
  test_block(block);
}

}  // namespace

int main(int count, char** arguments) {
  const bool all = count > 1 && std::strcmp(arguments[1], "all") == 0;
  test_range(0, 0x7fffffff, all ? 1 : 1021);
  for (float near : {1e-45f, 0x1p-126f, 1.0f, 87.3365f, 88.7228f, 103.9721f, 3.4e38f}) {
    const uint64_t bits = dsx::bits_of(near);
    test_range(bits < 500 ? 0 : bits - 500, bits + 500, 1);
  }
  for (size_t f = 0; f < std::size(kFunctions); ++f) {
    std::printf("%s: off by %.3f at most\n", kFunctions[f].name, worst[f]);
  }
  return finish();
}
