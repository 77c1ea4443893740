// Tests optimizers/adam_cpu.cpp: every combination of storage types against the formula in double,
// and every ISA on several threads against the scalar one on one thread, bit for bit.
#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "adam_reference.h"
#include "dtypes.h"
#include "expect.h"

namespace {

using AdamCall = dsx::StepCall<dsx::Adam>;
using AdamTensor = dsx::StepTensor<dsx::Adam::kStates>;
using dsx::Dtype;
using dsx::Isa;

constexpr int64_t kSizes[] = {0, 1, 2, 3, 5, 17, 31, 0, 4096, 4097, 8191};
constexpr float kSteps[] = {1, 1, 2, 1000, 3'000'000};  // in turn

struct Parameter {
  Elements param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, param_copy;
  float step;
  int64_t n;
};

using List = std::vector<Parameter>;

// Gradients of mixed sizes, a few of them zero, infinite or NaN; second moments are never negative.
List make_list(const AdamCall& call) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  List list;
  for (int64_t n : kSizes) {
    list.push_back({Elements(call.types.param, n), Elements(call.types.grad, n),
                    Elements(call.types.state, n), Elements(call.types.state, n),
                    Elements(call.types.state, n), Elements(call.types.param_copy, n),
                    kSteps[list.size() % std::size(kSteps)], n});
    Parameter& parameter = list.back();
    for (int64_t i = 0; i < n; ++i) {
      const float special[] = {0, -0.0f, INFINITY, NAN};
      parameter.param.set(i, normal(random));
      parameter.grad.set(i, i % 97 < 4 ? special[i % 97] : normal(random) / float(1 + i % 50));
      parameter.exp_avg.set(i, normal(random) / 8);
      parameter.exp_avg_sq.set(i, std::fabs(normal(random)) / 16);
      parameter.max_exp_avg_sq.set(i, i % 53 == 5 ? NAN : std::fabs(normal(random)) / 16);
    }
  }
  return list;
}

// Runs the step with as many threads as there are parts, each on one part of the row.
void run(Isa isa, const AdamCall& call, bool copies, int64_t parts, List& list) {
  std::vector<AdamTensor> tensors;
  std::vector<int64_t> begins{0};
  for (Parameter& p : list) {
    void* max_exp_avg_sq = call.options.amsgrad ? p.max_exp_avg_sq.address() : nullptr;
    tensors.push_back({.param = p.param.address(),
                       .grad = p.grad.address(),
                       .states = {p.exp_avg.address(), p.exp_avg_sq.address(), max_exp_avg_sq},
                       .scales = {},
                       .param_copy = copies ? p.param_copy.address() : nullptr,
                       .step = &p.step,
                       .noise = {},
                       .n = p.n});
    begins.push_back(begins.back() + p.n);
  }
  std::vector<std::thread> threads;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = begins.back() * part / parts;
    const int64_t end = begins.back() * (part + 1) / parts;
    threads.emplace_back([&, begin, end] {
      step_cpu(isa, call, tensors.data(), begins.data(), int64_t(tensors.size()), begin, end);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

bool same_bits(float a, float b) {
  return dsx::bits_of(a) == dsx::bits_of(b) || (std::isnan(a) && std::isnan(b));
}

// Half a unit in the last place of the storage, and some of float for the arithmetic.
bool close(Dtype dtype, float value, double expected, double scale) {
  if (std::isnan(expected) || std::isinf(expected)) return same_bits(value, float(expected));
  const double relative[] = {0, 0x1p-8, 0x1p-11};  // indexed by Dtype
  const double rounding = relative[int(dtype)] * std::fabs(expected);
  const double smallest = dtype == Dtype::float16 ? 0x1p-25 : 0x1p-134;
  return std::fabs(value - expected) <= rounding + smallest + 1e-6 * scale;
}

void expect_close(const char* name, int64_t i, const Elements& elements, double expected,
                  double scale) {
  expect(close(elements.dtype(), elements[i], expected, scale), "%s[%ld] %s is %g, expected %g",
         name, long(i), kDtypeNames[int(elements.dtype())], elements[i], expected);
}

void expect_reference(const AdamCall& call, bool copies, const Parameter& old,
                      const Parameter& now) {
  for (int64_t i = 0; i < old.n; ++i) {
    const AdamElement before{old.param[i], old.exp_avg[i], old.exp_avg_sq[i],
                             old.max_exp_avg_sq[i]};
    const auto [value, scale] = adam_reference(call, old.step, old.grad[i], before);
    expect_close("param", i, now.param, value.param, scale.param);
    expect_close("exp_avg", i, now.exp_avg, value.exp_avg, scale.exp_avg);
    expect_close("exp_avg_sq", i, now.exp_avg_sq, value.exp_avg_sq, scale.exp_avg_sq);
    if (call.options.amsgrad) {
      expect_close("max_exp_avg_sq", i, now.max_exp_avg_sq, value.max_exp_avg_sq,
                   scale.max_exp_avg_sq);
    }
    if (copies) expect_close("param_copy", i, now.param_copy, value.param, scale.param);
    expect(same_bits(now.grad[i], old.grad[i]), "grad[%ld] has changed", long(i));
  }
}

void expect_same(const char* what, const List& a, const List& b) {
  for (size_t t = 0; t < a.size(); ++t) {
    for (int64_t i = 0; i < a[t].n; ++i) {
      expect(same_bits(a[t].param[i], b[t].param[i]) &&
                 same_bits(a[t].exp_avg[i], b[t].exp_avg[i]) &&
                 same_bits(a[t].exp_avg_sq[i], b[t].exp_avg_sq[i]) &&
                 same_bits(a[t].max_exp_avg_sq[i], b[t].max_exp_avg_sq[i]) &&
                 same_bits(a[t].param_copy[i], b[t].param_copy[i]),
             "%s: element %ld of tensor %zu differs from the scalar one", what, long(i), t);
    }
  }
}

void test_call(const AdamCall& call, bool copies) {
  const List before = make_list(call);
  List expected = before;
  run(Isa::scalar, call, copies, 1, expected);
  for (size_t t = 0; t < before.size(); ++t) {
    expect_reference(call, copies, before[t], expected[t]);
  }
  for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    List list = before;
    run(isa, call, copies, 3, list);
    expect_same(name_of(isa), expected, list);
  }
}

AdamCall make_call(int variant, const dsx::StepTypes& types) {
  AdamCall call{};
  call.options.beta1 = 0.9;
  call.options.beta2 = 0.95;
  call.options.eps = 1e-6;
  call.options.weight_decay = variant % 4 == 0 ? 0 : 0.1;
  call.options.decoupled = variant % 2 == 0;
  call.options.bias_correction = variant % 5 != 0;
  call.options.amsgrad = types.states == 3;
  call.lr.constant = 0.0123;
  call.grad_scale.constant = variant % 7 == 0 ? 1 : 1.7;
  call.maximize = variant % 3 == 0;
  call.types = types;
  return call;
}

}  // namespace

int main() {
  int variant = 0;
  for (Dtype param : kDtypes) {
    for (Dtype grad : kDtypes) {
      for (Dtype moment : kDtypes) {
        for (int copy = 0; copy < 3; ++copy) {  // none, bfloat16, float16
          const int states = variant % 2 == 1 ? 3 : 2;
          test_call(make_call(variant, {param, grad, moment, kDtypes[copy], states}), copy > 0);
          ++variant;
        }
      }
    }
  }
  return finish();
}
