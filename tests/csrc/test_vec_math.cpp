// Tests exp, sigmoid and other functions of Vec against double, within the bounds that vec_math.inl
// states, and bit for bit between the ISAs: for every 1021st float and all near 0, 1 and the ends
// of the range. With the argument "all": every float against double, with the widest ISA.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <thread>
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
  double bound;                // in units of the last place
  double least_right;          // below it, in magnitude, 0 will do
  double growth = 0;           // of the bound, with the square of the argument
  double furthest = INFINITY;  // the largest argument, in magnitude, that is tested
  double largest = INFINITY;   // and the largest one
};

#define RUN(name)                                          \
  [](Isa isa, const float* source, float* result, int n) { \
    DSX_DISPATCH_ISA(isa, all_##name(source, result, n));  \
  }

constexpr double kEighth = 0.78539819;  // of a turn
constexpr double kRoot = 1.41421356237309505, kDensity = 0.398942280401432678;

// The library's takes long; beyond these, the difference is nothing in float.
double exp_of(double a) {
  if (std::fabs(a) < 0x1p-30) return 1 + a;
  return a > 120 ? INFINITY : a < -120 ? 0 : std::exp(a);
}

const Function kFunctions[] = {
    {"exp", RUN(exp), exp_of, 1.1, 0},
    {"exp_of_negative", RUN(exp_of_negative), exp_of, 1.1, 0x1p-126, 0, INFINITY, 0},
    {"log", RUN(log), [](double a) { return std::log(a); }, 0.9, 0},
    {"sigmoid", RUN(sigmoid), [](double a) { return 1 / (1 + exp_of(-a)); }, 2.6, 0x1p-126},
    {"rsqrt", RUN(rsqrt), [](double a) { return 1 / std::sqrt(a); }, 1.5, 0},
    {"erf", RUN(erf), [](double a) { return std::erf(a); }, 3, 0},
    {"tanh", RUN(tanh), [](double a) { return std::tanh(a); }, 5.2, 0},
    {"distribution", RUN(distribution), [](double a) { return std::erfc(-a / kRoot) / 2; }, 8, 0,
     0.5},
    {"small_sin", RUN(small_sin), [](double a) { return std::sin(a); }, 1.5, 0, 0, kEighth},
    {"small_cos", RUN(small_cos), [](double a) { return std::cos(a); }, 1.5, 0, 0, kEighth},
    {"density", RUN(density), [](double a) { return exp_of(-a * a / 2) * kDensity; }, 2, 0, 0.5},
};

// The distance of floats near `value`.
double last_place(double value) {
  if (value == 0) return 0x1p-149;
  return std::max(std::ldexp(1.0, std::ilogb(value) - 23), 0x1p-149);
}

constexpr size_t kCount = std::size(kFunctions);

std::mutex reporting;

struct Errors {
  double worst[kCount] = {};

  void test(size_t f, float a, float result) {
    const Function& function = kFunctions[f];
    if (double(a) > function.largest || std::fabs(a) > function.furthest) return;
    const double want = function.right(double(a)), got = double(result);
    bool right = std::isnan(want) ? std::isnan(got) : got == want || got == double(float(want));
    if (!right && std::isfinite(want) && std::isfinite(got)) {
      const double error = std::fabs(got - want) / last_place(want);
      const double more = function.growth * double(a) * double(a);
      right =
          error <= function.bound + more || (got == 0 && std::fabs(want) < function.least_right);
      if (std::fabs(want) >= function.least_right) {
        worst[f] = std::max(worst[f], error - more);
      }
    }
    // The largest float and infinity are neighbours.
    if (std::isinf(got) != std::isinf(want)) right |= std::fabs(want) > 3.4028234e38;
    if (right) return;
    const std::lock_guard lock(reporting);
    expect(false, "%s of %a is %a, expected %a", function.name, double(a), got, want);
  }
};

Errors errors;

void test_block(const std::vector<float>& source) {
  std::vector<float> scalar(source.size()), result(source.size());
  const int n = int(source.size());
  for (size_t f = 0; f < kCount; ++f) {
    const Function& function = kFunctions[f];
    function.run(Isa::scalar, source.data(), scalar.data(), n);
    for (int i = 0; i < n; ++i) errors.test(f, source[size_t(i)], scalar[size_t(i)]);
    for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
      if (isa > dsx::current_isa()) break;
      function.run(isa, source.data(), result.data(), n);
      for (int i = 0; i < n; ++i) {
        if (double(source[size_t(i)]) > function.largest) continue;
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

// All floats, 2^32 of them, on all processors.
void test_all() {
  std::atomic<uint64_t> next{0};
  std::atomic<int64_t> tested{0};
  std::vector<std::thread> threads;
  std::vector<Errors> of_threads(std::max(1u, std::thread::hardware_concurrency()));
  for (Errors& mine : of_threads) {
    threads.emplace_back([&] {
      std::vector<float> source(kBlock), result(kBlock);
      for (uint64_t bits; (bits = next.fetch_add(kBlock)) <= 0xffffffff; tested += kBlock) {
        for (int i = 0; i < kBlock; ++i) source[size_t(i)] = dsx::float_of(uint32_t(bits) + i);
        for (size_t f = 0; f < kCount; ++f) {
          kFunctions[f].run(dsx::current_isa(), source.data(), result.data(), kBlock);
          for (size_t i = 0; i < kBlock; ++i) mine.test(f, source[i], result[i]);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect(tested == int64_t(1) << 32, "%ld floats were tested", long(tested));
  for (const Errors& mine : of_threads) {
    for (size_t f = 0; f < kCount; ++f) {
      errors.worst[f] = std::max(errors.worst[f], mine.worst[f]);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "all") == 0) {
    test_all();
  } else {
#ifdef __SANITIZE_ADDRESS__  // which makes it slow, and looks at memory, not at values
    test_range(0, 0x7fffffff, 16381);
#else
    test_range(0, 0x7fffffff, 1021);
#endif
    for (float near : {1e-45f, 0x1p-126f, 0.625f, 0.70710677f, 1.0f, 1.4142135f, 9.0f, 13.2f, 14.4f,
                       87.3365f, 87.33654f, 88.7228f, 103.9721f, 3.4e38f}) {
      const uint64_t bits = dsx::bits_of(near);
      test_range(bits < 500 ? 0 : bits - 500, bits + 500, 1);
    }
  }
  for (size_t f = 0; f < kCount; ++f) {
    std::printf("%s: off by %.3f at most\n", kFunctions[f].name, errors.worst[f]);
  }
  return finish();
}
