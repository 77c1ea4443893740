// Tests optimizers/lamb_cpu.cpp: both passes of every ISA, on several threads, write the same bytes
// and sums as those of the scalar one on one thread, and nothing beyond their tensors; the sums are
// those of what was stored.
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "optimizers/chunks.h"
#include "expect.h"
#include "optimizers/lamb.h"

namespace {

using dsx::Dtype;
using dsx::Isa;
using LambTensor = dsx::StepTensor<dsx::LambApply::kStates>;
using Bytes = std::vector<unsigned char>;  // as long as its tensor: a sanitizer sees one byte more

constexpr int64_t kSizes[] = {0, 1, 7, 257, 4096 + 13, dsx::kReductionChunk + 300};
constexpr double kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-3, kDecay = 0.1;

struct Format {
  const char* name;
  dsx::StepTypes types;
  bool noise;
};

using F = dsx::Format;
constexpr int kTwo = dsx::first_states(2);
constexpr Format kFormats[] = {
    {"float32", {F::float32, Dtype::float32, F::float32, Dtype::float32, kTwo}, false},
    {"bfloat16", {F::bfloat16, Dtype::bfloat16, F::bfloat16, Dtype::bfloat16, kTwo}, true},
    {"masters", {F::float32, Dtype::float16, F::float32, Dtype::float16, kTwo}, false},
    {"split, codes", {F::split, Dtype::bfloat16, F::codes, Dtype::bfloat16, kTwo}, true},
    {"float16, codes", {F::float16, Dtype::float32, F::codes, Dtype::float16, kTwo}, false},
};

struct Parameter {
  Bytes param, grad, copy, states[2], scales[2];
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
    for (int j = 0; j < 2; ++j) {
      parameter.states[j] = elements(random, types.state, n, j > 0);
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

std::vector<LambTensor> tensors_of(const Format& format, Run& run) {
  std::vector<LambTensor> tensors;
  for (Parameter& p : run.list) {
    LambTensor tensor{};
    // Of a float32 original the copy is what the model has; of halves it is the lower ones.
    const bool original = !p.copy.empty() && format.types.weight == F::float32;
    tensor.source.param = original ? p.copy.data() : p.param.data();
    tensor.source.master = original ? p.param.data() : p.copy.empty() ? nullptr : p.copy.data();
    for (int j = 0; j < 2; ++j) {
      tensor.source.states[j] = p.states[j].data();
      tensor.source.scales[j] = reinterpret_cast<float*>(p.scales[j].data());
    }
    tensor.source.step_count = &p.step;
    tensor.target = tensor.source;
    tensor.grad = p.grad.data();
    tensor.noise = {uint64_t(17 * p.n), 1000 * p.n, format.noise};
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

template <dsx::Pass pass>
dsx::StepCall<dsx::Lamb<pass>> make_call(const Format& format) {
  dsx::StepCall<dsx::Lamb<pass>> call{};
  call.options = {kBeta1, kBeta2, kEps, kDecay, format.noise, true};
  call.lr.constant = 0.01;
  call.grad_scale.constant = 2;
  call.types = format.types;
  return call;
}

void take_step(Isa isa, const Format& format, int64_t parts, Run& run) {
  const std::vector<LambTensor> tensors = tensors_of(format, run);
  const int64_t count = int64_t(tensors.size());
  const auto begins = dsx::begins_of(tensors.size(), [&](size_t i) { return tensors[i].n; });
  const auto first_chunk = dsx::begins_of(
      tensors.size(), [&](size_t i) { return dsx::ceil_div(tensors[i].n, dsx::kReductionChunk); });
  std::vector<double> of_chunks(size_t(first_chunk.back() * dsx::kMeasured));
  const auto moments = make_call<dsx::Pass::moments>(format);
  on_threads(begins.back(), parts, [&](int64_t begin, int64_t end) {
    measure_cpu(isa, moments, tensors.data(), begins.data(), first_chunk.data(), count, begin, end,
                of_chunks.data());
  });
  run.squares.resize(tensors.size() * dsx::kMeasured);
  dsx::add_chunks(of_chunks.data(), first_chunk, dsx::kMeasured, run.squares.data());
  std::vector<float> coefficients(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) coefficients[i] = 0.5f + float(i);
  auto apply = make_call<dsx::Pass::apply>(format);
  apply.types.grad = apply.types.weight == F::float32 ? Dtype::float32 : Dtype::bfloat16;
  apply.coefficients = coefficients.data();
  on_threads(begins.back(), parts, [&](int64_t begin, int64_t end) {
    step_cpu(isa, apply, tensors.data(), begins.data(), count, begin, end);
  });
}

void expect_same(const Format& format, Isa isa, const Run& got, const Run& want) {
  expect(got.squares == want.squares, "%s: squares of %s differ from the scalar ones", format.name,
         name_of(isa));
  for (size_t t = 0; t < got.list.size(); ++t) {
    const Parameter &a = got.list[t], &b = want.list[t];
    bool same = a.param == b.param && a.copy == b.copy && a.grad == b.grad && a.step == b.step;
    for (int j = 0; j < 2; ++j) {
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

// All in float32: the formula in double, from the moments that the first pass has left.
void expect_formula(const Run& before, const Run& after) {
  for (size_t t = 0; t < after.list.size(); ++t) {
    const Parameter &old = before.list[t], &now = after.list[t];
    const double correction1 = 1 - std::pow(kBeta1, old.step);
    const double correction2 = 1 - std::pow(kBeta2, old.step);
    double squares[2] = {};
    for (int64_t i = 0; i < old.n; ++i) {
      const double param = at(old.param, i), grad = at(old.grad, i) / 2.0;
      const double exp_avg = at(now.states[0], i), exp_avg_sq = at(now.states[1], i);
      const double update =
          exp_avg / correction1 / (std::sqrt(exp_avg_sq / correction2) + kEps) + kDecay * param;
      squares[0] += param * param;
      squares[1] += update * update;
      const double expected = param - 0.01 * (0.5 + double(t)) * update;
      expect(std::fabs(exp_avg - (kBeta1 * at(old.states[0], i) + (1 - kBeta1) * grad)) < 1e-6 &&
                 std::fabs(at(now.param, i) - expected) < 2e-6 * (1 + std::fabs(expected)),
             "element %ld of tensor %zu is %g, expected %g", long(i), t, at(now.param, i),
             expected);
    }
    for (int k = 0; k < 2; ++k) {
      const double got = after.squares[2 * t + size_t(k)];
      expect(std::fabs(got - squares[k]) <= 1e-6 * squares[k], "square %d of tensor %zu is %g, %g",
             k, t, got, squares[k]);
    }
  }
}

}  // namespace

int main() {
  for (const Format& format : kFormats) {
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
  return finish();
}
