// Tests the CPU loops of the elementwise optimizer steps: combinations of storage types against the
// formula in double, and every ISA on several threads against the scalar one on one thread, bit for
// bit.
#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "dtypes.h"
#include "expect.h"
#include "step_reference.h"

namespace {

using dsx::Dtype;
using dsx::Isa;
using dsx::StepCall;

constexpr int64_t kSizes[] = {0, 1, 2, 3, 5, 17, 31, 0, 4096, 4097, 8191};
constexpr float kSteps[] = {1, 1, 2, 1000, 3'000'000};  // in turn

struct Parameter {
  Elements param, grad, param_copy;
  std::vector<Elements> states;  // absent ones stay 0
  float step;
  int64_t n;
};

using List = std::vector<Parameter>;

// Gradients of mixed sizes, a few of them zero, infinite or NaN; state of squares is not negative.
template <class Rule>
List make_list(const StepCall<Rule>& call) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  List list;
  for (int64_t n : kSizes) {
    list.push_back({Elements(dtype_of(call.types.weight), n), Elements(call.types.grad, n),
                    Elements(call.types.param, n),
                    std::vector(size_t(Rule::kStates), Elements(dtype_of(call.types.state), n)),
                    kSteps[list.size() % std::size(kSteps)], n});
    Parameter& parameter = list.back();
    for (int64_t i = 0; i < n; ++i) {
      const float special[] = {0, -0.0f, INFINITY, NAN};
      parameter.param.set(i, normal(random));
      parameter.grad.set(i, i % 97 < 4 ? special[i % 97] : normal(random) / float(1 + i % 50));
      for (int j = 0; j < Rule::kStates; ++j) {
        if (!call.types.has_state(j)) continue;
        const float value = normal(random) / 8;
        const bool last_of_many = j == 2 && i % 53 == 5;
        parameter.states[size_t(j)].set(i, last_of_many         ? NAN
                                           : Rule::is_signed(j) ? value
                                                                : std::fabs(value));
      }
    }
  }
  return list;
}

// Runs the step with as many threads as there are parts, each on one part of the row.
template <class Rule>
void run(Isa isa, const StepCall<Rule>& call, bool copies, int64_t parts, List& list) {
  std::vector<dsx::StepTensor<Rule::kStates>> tensors;
  std::vector<int64_t> begins{0};
  for (Parameter& p : list) {
    dsx::StepTensor<Rule::kStates> tensor{};
    tensor.source.param = copies ? p.param_copy.address() : p.param.address();
    tensor.source.master = copies ? p.param.address() : nullptr;
    for (int j = 0; j < Rule::kStates; ++j) {
      if (call.types.has_state(j)) tensor.source.states[j] = p.states[size_t(j)].address();
    }
    tensor.source.step_count = &p.step;
    tensor.target = tensor.source;
    tensor.grad = p.grad.address();
    tensor.n = p.n;
    tensors.push_back(tensor);
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
  return std::fabs(value - expected) <= rounding + smallest + kRelative * scale;
}

void expect_close(const char* op, const char* name, int64_t i, const Elements& elements,
                  double expected, double scale) {
  expect(close(elements.dtype(), elements[i], expected, scale), "%s: %s[%ld] %s is %g, expected %g",
         op, name, long(i), kDtypeNames[int(elements.dtype())], elements[i], expected);
}

template <class Rule>
void expect_reference(const StepCall<Rule>& call, bool copies, const Parameter& old,
                      const Parameter& now) {
  for (int64_t i = 0; i < old.n; ++i) {
    Element before{old.param[i], {}};
    for (int j = 0; j < Rule::kStates; ++j) {
      if (call.types.has_state(j)) before.states[j] = old.states[size_t(j)][i];
    }
    const auto [value, scale] = reference(call, old.step, old.grad[i], before);
    expect_close(Rule::kOp, "param", i, now.param, value.param, scale.param);
    for (int j = 0; j < Rule::kStates; ++j) {
      if (!call.types.has_state(j)) continue;
      expect_close(Rule::kOp, Rule::kStateNames[j], i, now.states[size_t(j)], value.states[j],
                   scale.states[j]);
    }
    if (copies) {
      expect_close(Rule::kOp, "param_copy", i, now.param_copy, value.param, scale.param);
    }
    expect(same_bits(now.grad[i], old.grad[i]), "grad[%ld] has changed", long(i));
  }
}

void expect_same(const char* op, const char* isa, const List& a, const List& b) {
  for (size_t t = 0; t < a.size(); ++t) {
    for (int64_t i = 0; i < a[t].n; ++i) {
      bool same = same_bits(a[t].param[i], b[t].param[i]) &&
                  same_bits(a[t].param_copy[i], b[t].param_copy[i]);
      for (size_t j = 0; j < a[t].states.size(); ++j) {
        same = same && same_bits(a[t].states[j][i], b[t].states[j][i]);
      }
      expect(same, "%s with %s: element %ld of tensor %zu differs from the scalar one", op, isa,
             long(i), t);
    }
  }
}

template <class Rule>
void test_call(const StepCall<Rule>& call, bool copies) {
  const List before = make_list(call);
  List expected = before;
  run(Isa::scalar, call, copies, 1, expected);
  for (size_t t = 0; t < before.size(); ++t) {
    expect_reference(call, copies, before[t], expected[t]);
  }
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    List list = before;
    run(isa, call, copies, 3, list);
    expect_same(Rule::kOp, name_of(isa), expected, list);
  }
}

// Options that together reach every branch.
dsx::Adam::Options options_of(const StepCall<dsx::Adam>& call, int variant) {
  return {.beta1 = 0.9,
          .beta2 = 0.95,
          .eps = 1e-6,
          .weight_decay = variant % 4 == 0 ? 0 : 0.1,
          .decoupled = variant % 2 == 0,
          .bias_correction = variant % 7 != 0,
          .amsgrad = call.types.has_state(2)};
}
[[maybe_unused]] dsx::Lion::Options options_of(const StepCall<dsx::Lion>&, int variant) {
  return {.beta1 = 0.9, .beta2 = 0.95, .weight_decay = variant % 4 == 0 ? 0 : 0.1};
}
[[maybe_unused]] dsx::Adagrad::Options options_of(const StepCall<dsx::Adagrad>&, int variant) {
  return {.lr_decay = variant % 2 == 0 ? 0 : 1e-3,
          .eps = 1e-6,
          .weight_decay = variant % 4 == 0 ? 0 : 0.1};
}
[[maybe_unused]] dsx::Sgd::Options options_of(const StepCall<dsx::Sgd>& call, int variant) {
  return {.momentum = call.types.has_state(0) ? 0.9 : 0,
          .dampening = variant % 7 == 0 ? 0.25 : 0,
          .weight_decay = variant % 4 == 0 ? 0 : 0.1,
          .nesterov = variant % 3 == 0,
          .wd_after_momentum = variant % 2 == 0};
}
[[maybe_unused]] dsx::Rmsprop::Options options_of(const StepCall<dsx::Rmsprop>& call, int variant) {
  return {.alpha = 0.9,
          .eps = 1e-6,
          .momentum = call.types.has_state(2) ? 0.8 : 0,
          .weight_decay = variant % 4 == 0 ? 0 : 0.1,
          .centered = call.types.has_state(1)};
}

// Fewer states than usual if a rule can do with fewer, else all, or all but one of several that may
// be absent.
template <class Rule>
int unusual_states(int variant) {
  if (Rule::kRequiredStates < Rule::kUsualStates) return dsx::first_states(Rule::kRequiredStates);
  const int optional = Rule::kStates - Rule::kRequiredStates;
  const int absent = optional > 1 ? variant % (optional + 1) : 0;
  const int without = absent > 0 ? 1 << (Rule::kRequiredStates + absent - 1) : 0;
  return dsx::first_states(Rule::kStates) & ~without;
}

// Goes through storage types: all of them, or every fifth combination.
template <class Rule>
void test_rule(bool all) {
  int variant = 0;
  for (Dtype param : kDtypes) {
    for (Dtype grad : kDtypes) {
      for (Dtype state : kDtypes) {
        for (int copy = 0; copy < 3; ++copy) {  // none, bfloat16, float16
          ++variant;
          if (!all && variant % 5 != 0) continue;  // in step with none of the options
          const bool unusual = variant % 8 >= 4;
          const int usual = dsx::first_states(Rule::kUsualStates);
          StepCall<Rule> call{};
          call.types = {format_of(param), grad, format_of(state), kDtypes[copy],
                        unusual ? unusual_states<Rule>(variant) : usual};
          call.options = options_of(call, variant);
          call.lr.constant = 0.0123;
          call.grad_scale.constant = variant % 11 == 0 ? 1 : 1.7;
          call.maximize = variant % 3 == 0;
          test_call(call, copy > 0);
        }
      }
    }
  }
}

}  // namespace

int main() {
#ifdef __SANITIZE_THREAD__  // all rules share the loop, so their threads meet in all or none
  test_rule<dsx::Adam>(false);
#else
  test_rule<dsx::Adam>(true);
  test_rule<dsx::Lion>(false);
  test_rule<dsx::Adagrad>(false);
  test_rule<dsx::Sgd>(false);
  test_rule<dsx::Rmsprop>(false);
#endif
  return finish();
}
