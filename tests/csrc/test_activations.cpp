// Tests the rules of activations and of sums with biases by elementwise_cpu.cpp, in every ISA that
// this CPU has: rows that end where memory ends, against double, and bit for bit against the scalar
// ISA.
#include <cmath>
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "elementwise/bias_activation.h"
#undef DSX_RULES  // for a library, which has those of one op
#include "elementwise/gated_activation.h"
#undef DSX_RULES
#include "elementwise/dropout.h"
#undef DSX_RULES
#include "elementwise/nhwc_bias_add.h"
#include "expect.h"

namespace {

using dsx::Activation;
using dsx::Dtype;
using dsx::Isa;

constexpr int64_t kRows = 2 * dsx::kRowsOfGroup + 3;

struct Storage {
  Elements elements;
  int64_t count;

  Storage(Dtype dtype, int64_t n, float seed) : elements(dtype, n), count(n) {
    for (int64_t i = 0; i < n; ++i) elements.set(i, 3 * std::sin(seed + float(i) * 0.73f));
  }
  dsx::Rows rows(int64_t pitch) { return {elements.address(), pitch, elements.dtype()}; }
};

double value_of(Activation activation, double x) {
  switch (activation) {
    case Activation::gelu: return x * std::erfc(-x / std::sqrt(2.0)) / 2;
    case Activation::gelu_tanh:
      return x / (1 + std::exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
    case Activation::gelu_quick: return x / (1 + std::exp(-1.702 * x));
    case Activation::relu: return x > 0 ? x : 0;
    case Activation::silu: return x / (1 + std::exp(-x));
  }
  return NAN;
}

double slope_of(Activation activation, double x) {
  if (activation == Activation::relu) return x > 0;
  return (value_of(activation, x + 1e-5) - value_of(activation, x - 1e-5)) / 2e-5;
}

constexpr int64_t kSeed = 0x123456789abcdef;

// By the formula of dropout_math.inl, in whole numbers of its own.
bool is_kept(int64_t element) {
  uint64_t key = kSeed;
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9;
  key = (key ^ (key >> 27)) * 0x94d049bb133111eb;
  key ^= key >> 31;
  uint32_t bits = uint32_t(element) * 0x9e3779b9u + uint32_t(key);
  bits = (bits ^ (bits >> 16) ^ uint32_t(key >> 32) ^ uint32_t(element >> 32) * 0x9e3779b9u) *
         0x85ebca6bu;
  return (bits ^ (bits >> 15)) * 0xc2b2ae35u >= 1u << 30;
}

struct Case {
  Activation activation;
  int64_t n;
  Storage x, bias, grad;                                          // inputs; x is the gate too
  Storage out, grad_x, grad_bias, gated, grad_gate, grad_up, up;  // results, and an input
  Storage sum, grads;                                             // of nhwc_bias_add
  Storage dropped, grad_dropped, active, grad_active;             // of dropout
  std::vector<float> partials;

  Case(Activation which, Dtype of, Dtype others, int64_t length)
      : activation(which),
        n(length),
        x(of, kRows * n, 0),
        bias(others, n, 1),
        grad(of, kRows * n, 2),
        out(of, kRows * n, 3),
        grad_x(of, kRows * n, 4),
        grad_bias(others, n, 5),
        gated(of, kRows * n, 6),
        grad_gate(of, kRows * n, 7),
        grad_up(others, kRows * n, 8),
        up(others, kRows * n, 9),
        sum(of, kRows * n, 10),
        grads(others, n, 11),
        dropped(others, kRows * n, 12),
        grad_dropped(of, kRows * n, 13),
        active(of, kRows * n, 14),
        grad_active(of, kRows * n, 15),
        partials(size_t(3 * n)) {}

  void run(Isa isa, int64_t cut) {
    using dsx::Elementwise;
    const int64_t all = kRows * n;
    const Elementwise<dsx::BiasActivation> forward{
        kRows, n, {activation}, {x.rows(n)}, {bias.rows(0)}, {out.rows(n)}, {}};
    elementwise_cpu(isa, forward, 0, cut);
    elementwise_cpu(isa, forward, cut, all);
    const Elementwise<dsx::BiasActivationBackward> back{kRows,
                                                        n,
                                                        {activation},
                                                        {grad.rows(n), x.rows(n)},
                                                        {{}, bias.rows(0)},
                                                        {grad_x.rows(n)},
                                                        {{partials.data(), n, Dtype::float32}}};
    elementwise_tiles_cpu(isa, back, 0, 1);
    elementwise_tiles_cpu(isa, back, 1, 3);
    const auto add = dsx::add_groups_cpu<dsx::BiasActivationBackward>;
    add(isa, partials.data(), 3, n, 0, n / 2, grad_bias.rows(0));
    add(isa, partials.data(), 3, n, n / 2, n, grad_bias.rows(0));
    const Elementwise<dsx::GatedActivation> gate{
        kRows, n, {activation}, {x.rows(n), up.rows(n)}, {}, {gated.rows(n)}, {}};
    elementwise_cpu(isa, gate, 0, cut);
    elementwise_cpu(isa, gate, cut, all);
    const Elementwise<dsx::GatedActivationBackward> gate_back{kRows,
                                                              n,
                                                              {activation},
                                                              {x.rows(n), up.rows(n), grad.rows(n)},
                                                              {},
                                                              {grad_gate.rows(n), grad_up.rows(n)},
                                                              {}};
    elementwise_cpu(isa, gate_back, 0, cut);
    elementwise_cpu(isa, gate_back, cut, all);
    const Elementwise<dsx::NhwcBiasAdd> add_up{
        kRows, n, {}, {x.rows(n), up.rows(n)}, {bias.rows(0), bias.rows(0)}, {sum.rows(n)}, {}};
    elementwise_cpu(isa, add_up, 0, cut);
    elementwise_cpu(isa, add_up, cut, all);
    const Elementwise<dsx::NhwcBiasAddBackward> sums{
        kRows, n, {}, {grad.rows(n)}, {}, {}, {{partials.data(), n, Dtype::float32}}};
    elementwise_tiles_cpu(isa, sums, 0, 2);
    elementwise_tiles_cpu(isa, sums, 2, 3);
    dsx::add_groups_cpu<dsx::NhwcBiasAddBackward>(isa, partials.data(), 3, n, 0, n, grads.rows(0));
    drop(isa, cut);
  }

  void drop(Isa isa, int64_t cut) {
    using dsx::Elementwise;
    const int64_t all = kRows * n;
    const dsx::Dropout dropout = dsx::make_dropout(0.25, &kSeed);
    const auto run_all = [&](const auto& call) {
      elementwise_cpu(isa, call, 0, cut);
      elementwise_cpu(isa, call, cut, all);
    };
    run_all(Elementwise<dsx::BiasDropoutResidual>{
        kRows, n, {dropout}, {x.rows(n), {}, up.rows(n)}, {bias.rows(0)}, {dropped.rows(n)}, {}});
    run_all(Elementwise<dsx::BiasDropoutResidualBackward>{
        kRows, n, {dropout}, {grad.rows(n)}, {}, {grad_dropped.rows(n)}, {}});
    run_all(Elementwise<dsx::DropoutActivation>{
        kRows, n, {activation, dropout}, {x.rows(n)}, {bias.rows(0)}, {active.rows(n)}, {}});
    const Elementwise<dsx::DropoutActivationBackward> back{kRows,
                                                           n,
                                                           {activation, dropout},
                                                           {grad.rows(n), x.rows(n)},
                                                           {{}, bias.rows(0)},
                                                           {grad_active.rows(n)},
                                                           {{partials.data(), n, Dtype::float32}}};
    elementwise_tiles_cpu(isa, back, 0, 3);
  }

  std::vector<float> results() const {
    std::vector<float> found;
    for (const Storage* s : {&out, &grad_x, &grad_bias, &gated, &grad_gate, &grad_up, &sum, &grads,
                             &dropped, &grad_dropped, &active, &grad_active}) {
      for (int64_t i = 0; i < s->count; ++i) found.push_back(s->elements[i]);
    }
    return found;
  }

  // Of values up to about 10; slopes are differences, right to 1e-9.
  void compare(const char* what, const Storage& got, int64_t i, double want, double size) const {
    const Dtype dtype = got.elements.dtype();
    const double rounding = dtype == Dtype::float32   ? 0x1p-24
                            : dtype == Dtype::float16 ? 0x1p-11
                                                      : 0x1p-8;
    const double bound = size * (1e-5 + 1.1 * rounding);
    expect(std::fabs(double(got.elements[i]) - want) <= bound, "%s[%ld] of %ld is %g, expected %g",
           what, long(i), long(n), double(got.elements[i]), want);
  }

  void check() const {
    std::vector<double> bias_grads(size_t(n), 0), sums(size_t(n), 0);
    for (int64_t i = 0; i < kRows * n; ++i) {
      const double a = double(x.elements[i]), b = double(bias.elements[i % n]);
      const double g = double(grad.elements[i]), u = double(up.elements[i]);
      compare("out", out, i, value_of(activation, a + b), 8);
      compare("grad_x", grad_x, i, g * slope_of(activation, a + b), 8);
      bias_grads[size_t(i % n)] += g * slope_of(activation, a + b);
      compare("gated", gated, i, value_of(activation, a) * u, 10);
      compare("grad_gate", grad_gate, i, g * u * slope_of(activation, a), 16);
      compare("grad_up", grad_up, i, g * value_of(activation, a), 16);
      compare("sum", sum, i, a + u + 2 * b, 12);
      sums[size_t(i % n)] += g;
      const double scale = is_kept(i) / 0.75;
      compare("dropped", dropped, i, (a + b) * scale + u, 12);
      compare("grad_dropped", grad_dropped, i, g * scale, 4);
      compare("active", active, i, value_of(activation, a + b) * scale, 12);
      compare("grad_active", grad_active, i, g * slope_of(activation, a + b) * scale, 12);
    }
    for (int64_t i = 0; i < n; ++i) {
      compare("grad_bias", grad_bias, i, bias_grads[size_t(i)], 4 * kRows);
      compare("grads", grads, i, sums[size_t(i)], 3 * kRows);
    }
  }
};

void test(Activation activation, Dtype of, Dtype others, int64_t n) {
  Case scalar(activation, of, others, n);
  scalar.run(Isa::scalar, 33);
  scalar.check();
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    Case other(activation, of, others, n);
    other.run(isa, 5);
    const std::vector<float> want = scalar.results(), got = other.results();
    expect(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0,
           "%s: other bits for length %ld", name_of(isa), long(n));
  }
}

// Rows around element number 2^32, all of which lie in the same memory.
void test_many_elements() {
  Elements out(Dtype::bfloat16, 600);
  const int64_t row = ((int64_t(1) << 32) - 300) / 600, begin = row * 600;
  dsx::BFloat16 one{0x3f80};
  std::vector<dsx::BFloat16> ones(600, one);
  const dsx::Rows x{ones.data(), 0, Dtype::bfloat16};
  const dsx::Rows target{out.address(), 0, Dtype::bfloat16};
  const dsx::Elementwise<dsx::BiasDropoutResidual> call{
      row + 2, 600, {dsx::make_dropout(0.25, &kSeed)}, {x}, {}, {target}, {}};
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    for (int64_t first : {begin, begin + 600}) {
      elementwise_cpu(isa, call, first, first + 77);
      elementwise_cpu(isa, call, first + 77, first + 600);
      for (int64_t i = 0; i < 600; ++i) {
        expect((out[i] != 0) == is_kept(first + i), "%s: element %ld", name_of(isa),
               long(first + i));
      }
    }
  }
}

}  // namespace

int main() {
  test_many_elements();
  for (int64_t activation = 0; activation < dsx::kActivations; ++activation) {
    for (int64_t n : {1, 16, 33}) {
      for (Dtype dtype : kDtypes) test(Activation(activation), dtype, dtype, n);
      test(Activation(activation), Dtype::bfloat16, Dtype::float32, n);
    }
  }
  test(Activation::gelu, Dtype::float16, Dtype::bfloat16, 515);
  return finish();
}
