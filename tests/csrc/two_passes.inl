// Tests the CPU loops of an optimizer of two passes, in every ISA and on several threads: they
// write the same bytes and sums as the scalar one on one thread, and nothing beyond their tensors;
// all in float32 they are what the formula in double gives. Who includes this has before it:
//
//   using Measure, Update;            // the rules of the passes
//   constexpr int kStatesOfCalls[];   // how many states there are; each is tried
//   Measure::Options measure_options(bool variant);
//   Update::Options update_options(bool variant, int states);
//   Expected expected_of(const Element&);  // without variant
#include <bit>
#include <cstring>
#include <random>
#include <thread>

#include "optimizers/chunks.h"

namespace {

using dsx::Dtype;
using dsx::Isa;
using Tensor = dsx::StepTensor<Update::kStates>;
using Bytes = std::vector<unsigned char>;  // as long as its tensor: a sanitizer sees one byte more

constexpr int64_t kSizes[] = {0, 1, 7, 257, 4096 + 13, dsx::kReductionChunk + 300};
constexpr int kStates = Update::kStates;
constexpr double kRate = 0.01, kGradScale = 2;

struct Format {
  const char* name;
  dsx::StepTypes types;
  bool variant;  // with noise, and other options
};

using F = dsx::Format;
constexpr int kAll = dsx::first_states(kStates);
constexpr Format kFormats[] = {
    {"float32", {F::float32, Dtype::float32, F::float32, Dtype::float32, kAll}, false},
    {"bfloat16", {F::bfloat16, Dtype::bfloat16, F::bfloat16, Dtype::bfloat16, kAll}, true},
    {"masters", {F::float32, Dtype::float16, F::float32, Dtype::float16, kAll}, false},
    {"split, codes", {F::split, Dtype::bfloat16, F::codes, Dtype::bfloat16, kAll}, true},
    {"float16, codes", {F::float16, Dtype::float32, F::codes, Dtype::float16, kAll}, false},
};

struct Parameter {
  Bytes param, grad, copy, states[kStates], scales[kStates];
  float step;
  int64_t n;
};

struct Run {
  std::vector<Parameter> list;
  std::vector<double> squares;  // [tensors, kMeasured]
};

Bytes elements(std::mt19937& random, F format, int64_t n, bool positive) {
  std::normal_distribution<float> normal;
  Bytes bytes(size_t(n * dsx::bytes_of(format)));
  for (int64_t i = 0; i < n; ++i) {
    const float value = positive ? std::fabs(normal(random)) : normal(random);
    const auto narrow = dsx::from_float<dsx::BFloat16>(value);
    const auto half = dsx::from_float<dsx::Half>(value);
    unsigned char* target = &bytes[size_t(i * dsx::bytes_of(format))];
    switch (format) {
      case F::float32: memcpy(target, &value, 4); break;
      case F::float16: memcpy(target, &half, 2); break;
      case F::codes: *target = uint8_t(random()); break;
      default: memcpy(target, &narrow, 2); break;
    }
  }
  return bytes;
}

Run make_run(const dsx::StepTypes& types) {
  std::mt19937 random(3);
  Run run;
  for (int64_t n : kSizes) {
    Parameter parameter{.param = elements(random, types.weight, n, false),
                        .grad = elements(random, format_of(types.grad), n, false),
                        .copy = {},
                        .states = {},
                        .scales = {},
                        .step = float(3 * run.list.size() + 1),
                        .n = n};
    if (types.weight != format_of(types.param)) parameter.copy = Bytes(size_t(2 * n), 0x95);
    for (int j = 0; j < kStates; ++j) {
      if (!types.has_state(j)) continue;
      parameter.states[j] = elements(random, types.state, n, !Update::is_signed(j));
      const int64_t blocks = dsx::ceil_div(n, dsx::kCodesBlock);
      const std::vector<float> scales(size_t(blocks), 0.5f);
      if (types.state == F::codes) {
        parameter.scales[j].resize(size_t(4 * blocks));
        if (blocks > 0) memcpy(parameter.scales[j].data(), scales.data(), size_t(4 * blocks));
      }
    }
    run.list.push_back(parameter);
  }
  return run;
}

std::vector<Tensor> tensors_of(const Format& format, Run& run) {
  std::vector<Tensor> tensors;
  for (Parameter& p : run.list) {
    Tensor tensor{};
    // Of a float32 original the copy is what the model has; of halves it is the lower ones.
    const bool original = !p.copy.empty() && format.types.weight == F::float32;
    tensor.source.param = original ? p.copy.data() : p.param.data();
    tensor.source.master = original ? p.param.data() : p.copy.empty() ? nullptr : p.copy.data();
    for (int j = 0; j < kStates; ++j) {
      if (!format.types.has_state(j)) continue;
      tensor.source.states[j] = p.states[j].data();
      tensor.source.scales[j] = reinterpret_cast<float*>(p.scales[j].data());
    }
    tensor.source.step_count = &p.step;
    tensor.target = tensor.source;
    tensor.grad = p.grad.data();
    tensor.noise = {uint64_t(17 * p.n), 1000 * p.n, format.variant};
    tensor.n = p.n;
    tensors.push_back(tensor);
  }
  return tensors;
}

// Calls body(begin, end) on as many threads as there are parts.
template <class Body>
void on_threads(int64_t elements, int64_t parts, const Body& body) {
  std::vector<std::thread> threads;
  for (int64_t part = 0; part < parts; ++part) {
    threads.emplace_back(body, elements * part / parts, elements * (part + 1) / parts);
  }
  for (std::thread& thread : threads) thread.join();
}

template <class Rule>
dsx::StepCall<Rule> make_call(const Format& format, const typename Rule::Options& options) {
  dsx::StepCall<Rule> call{};
  call.options = options;
  call.lr.constant = kRate;
  call.grad_scale.constant = kGradScale;
  call.types = format.types;
  return call;
}

float coefficient_of(size_t tensor) { return 0.5f + float(tensor); }

void take_step(Isa isa, const Format& format, int64_t parts, Run& run) {
  const std::vector<Tensor> tensors = tensors_of(format, run);
  const int64_t count = int64_t(tensors.size());
  const auto begins = dsx::begins_of(tensors.size(), [&](size_t i) { return tensors[i].n; });
  const auto first_chunk = dsx::begins_of(
      tensors.size(), [&](size_t i) { return dsx::ceil_div(tensors[i].n, dsx::kReductionChunk); });
  std::vector<double> of_chunks(size_t(first_chunk.back() * dsx::kMeasured));
  const auto measure = make_call<Measure>(format, measure_options(format.variant));
  on_threads(begins.back(), parts, [&](int64_t begin, int64_t end) {
    measure_cpu(isa, measure, tensors.data(), begins.data(), first_chunk.data(), count, begin, end,
                of_chunks.data());
  });
  run.squares.resize(tensors.size() * dsx::kMeasured);
  dsx::add_chunks(of_chunks.data(), first_chunk, dsx::kMeasured, run.squares.data());
  std::vector<float> coefficients(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) coefficients[i] = coefficient_of(i);
  const int states = std::popcount(unsigned(format.types.states));
  auto update = make_call<Update>(format, update_options(format.variant, states));
  if (!reads_grads(Update::kPass)) {
    update.types.grad = format.types.weight == F::float32 ? Dtype::float32 : Dtype::bfloat16;
  }
  update.coefficients = coefficients.data();
  on_threads(begins.back(), parts, [&](int64_t begin, int64_t end) {
    step_cpu(isa, update, tensors.data(), begins.data(), count, begin, end);
  });
}

void expect_same(const Format& format, Isa isa, const Run& got, const Run& want) {
  expect(got.squares == want.squares, "%s: squares of %s differ from the scalar ones", format.name,
         name_of(isa));
  for (size_t t = 0; t < got.list.size(); ++t) {
    const Parameter &a = got.list[t], &b = want.list[t];
    bool same = a.param == b.param && a.copy == b.copy && a.grad == b.grad && a.step == b.step;
    for (int j = 0; j < kStates; ++j) {
      same = same && a.states[j] == b.states[j] && a.scales[j] == b.scales[j];
    }
    expect(same, "%s: tensor %zu of %s differs from the scalar one", format.name, t, name_of(isa));
  }
}

float at(const Bytes& floats, int64_t i) {
  float value;
  memcpy(&value, &floats[size_t(4 * i)], 4);
  return value;
}

void expect_close(const char* what, int64_t i, size_t tensor, double got, double want) {
  expect(std::fabs(got - want) <= 2e-6 * (1 + std::fabs(want)),
         "%s %ld of tensor %zu is %g, expected %g", what, long(i), tensor, got, want);
}

// All in float32: against the formula in double.
void expect_formula(const Run& before, const Run& after) {
  for (size_t t = 0; t < after.list.size(); ++t) {
    const Parameter &old = before.list[t], &now = after.list[t];
    double squares[2] = {};
    for (int64_t i = 0; i < old.n; ++i) {
      Element element{.step = old.step,
                      .rate = kRate * coefficient_of(t),
                      .param = at(old.param, i),
                      .grad = at(old.grad, i) / kGradScale};
      for (int j = 0; j < kStates; ++j) {
        if (old.states[j].empty()) continue;
        element.old_states[j] = at(old.states[j], i), element.states[j] = at(now.states[j], i);
      }
      const Expected expected = expected_of(element);
      expect_close("element", i, t, at(now.param, i), expected.param);
      for (int j = 0; j < kStates; ++j) {
        if (old.states[j].empty()) continue;
        expect_close(Update::kStateNames[j], i, t, element.states[j], expected.states[j]);
      }
      for (int k = 0; k < 2; ++k) squares[k] += expected.measured[k] * expected.measured[k];
    }
    for (int k = 0; k < 2; ++k) {
      const double got = after.squares[2 * t + size_t(k)];
      expect(std::fabs(got - squares[k]) <= 1e-6 * squares[k], "square %d of tensor %zu is %g, %g",
             k, t, got, squares[k]);
    }
  }
}

void test_format(const Format& format) {
  const Run before = make_run(format.types);
  Run expected = before;
  take_step(Isa::scalar, format, 1, expected);
  expect(expected.list.back().param != before.list.back().param, "%s: nothing has changed",
         format.name);
  if (format.types.state == F::float32 && format.types.grad == Dtype::float32) {
    expect_formula(before, expected);
  }
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    Run run = before;
    take_step(isa, format, 3, run);
    expect_same(format, isa, run, expected);
  }
}

}  // namespace

int main() {
  for (Format format : kFormats) {
    for (int states : kStatesOfCalls) {
      format.types.states = dsx::first_states(states);
      test_format(format);
    }
  }
  return finish();
}
