// Tests the storage formats of optimizers/storage_math.inl inside Adam's loop: every ISA, on
// several threads, writes the same bytes as the scalar one on one thread, and nothing beyond its
// tensors.
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "expect.h"
#include "optimizers/adam.h"

namespace {

using dsx::Dtype;
using dsx::Isa;
using Call = dsx::StepCall<dsx::Adam>;
using Tensor = dsx::StepTensor<dsx::Adam::kStates>;
using Bytes = std::vector<unsigned char>;  // as long as its tensor: a sanitizer sees one byte more

constexpr int64_t kSizes[] = {0, 1, 7, 255, 256, 257, 4096 + 13, 2 * 4096};

struct Format {
  const char* name;
  dsx::StepTypes types;
  bool noise;
};

using F = dsx::Format;
constexpr int kTwo = dsx::first_states(2), kThree = dsx::first_states(3);
constexpr Format kFormats[] = {
    {"split, codes", {F::split, Dtype::bfloat16, F::codes, Dtype::bfloat16, kTwo}, true},
    {"split, codes, nearest, amsgrad",
     {F::split, Dtype::bfloat16, F::codes, Dtype::bfloat16, kThree},
     false},
    {"split, float32", {F::split, Dtype::float32, F::float32, Dtype::bfloat16, kTwo}, true},
    {"float32, codes", {F::float32, Dtype::float16, F::codes, Dtype::bfloat16, kThree}, true},
    {"bfloat16 at random",
     {F::bfloat16, Dtype::bfloat16, F::bfloat16, Dtype::bfloat16, kTwo},
     true},
    {"float32, bfloat16 at random",
     {F::float32, Dtype::float16, F::bfloat16, Dtype::bfloat16, kThree},
     true},
};

struct Parameter {
  Bytes param, grad, copy, states[3], scales[3];
  float step;
  int64_t n;
};

using List = std::vector<Parameter>;

class Filler {
 public:
  // Elements of this dtype: numbers of all sizes, zeros, and at times inf or NaN.
  Bytes elements(F format, int64_t n, bool positive) {
    Bytes bytes(size_t(n * dsx::bytes_of(format)));
    for (int64_t i = 0; i < n; ++i) {
      float value = normal_(random_) * std::exp2(float(int(random_() % 24)) - 16);
      if (random_() % 41 == 0) value = 0;
      if (random_() % 3001 == 0) value = random_() % 2 == 0 ? INFINITY : NAN;
      put(format, positive ? std::fabs(value) : value, &bytes[size_t(i * dsx::bytes_of(format))]);
    }
    return bytes;
  }

  Bytes scales(int64_t n) {
    Bytes bytes;
    for (int64_t block = 0; block * dsx::kCodesBlock < n; ++block) {
      const float scale = std::exp2(float(int(random_() % 30)) - 20);
      bytes.resize(bytes.size() + sizeof(float));
      memcpy(&bytes[bytes.size() - sizeof(float)], &scale, sizeof(float));
    }
    return bytes;
  }

 private:
  void put(F format, float value, unsigned char* target) {
    const auto narrow = dsx::from_float<dsx::BFloat16>(value);
    const auto half = dsx::from_float<dsx::Half>(value);
    const auto code = uint8_t(random_());
    switch (format) {
      case F::float32: memcpy(target, &value, 4); return;
      case F::float16: memcpy(target, &half, 2); return;
      case F::codes: memcpy(target, &code, 1); return;
      default: memcpy(target, &narrow, 2); return;
    }
  }

  std::mt19937 random_{5};
  std::normal_distribution<float> normal_;
};

List make_list(const dsx::StepTypes& types) {
  Filler filler;
  List list;
  for (int64_t n : kSizes) {
    Parameter parameter{.param = filler.elements(types.weight, n, false),
                        .grad = filler.elements(format_of(types.grad), n, false),
                        .copy = {},
                        .states = {},
                        .scales = {},
                        .step = float(3 * list.size() + 1),
                        .n = n};
    if (types.weight == F::split) parameter.copy = Bytes(size_t(2 * n), 0x95);
    for (int j = 0; types.has_state(j); ++j) {
      parameter.states[j] = filler.elements(types.state, n, j > 0);
      if (types.state == F::codes) parameter.scales[j] = filler.scales(n);
    }
    list.push_back(parameter);
  }
  return list;
}

void run(Isa isa, const Format& format, int64_t parts, List& list) {
  Call call{};
  call.options = {0.9, 0.95, 1e-6, 0.1, true, true, format.types.has_state(2)};
  call.lr.constant = 0.01;
  call.grad_scale.constant = 2;
  call.types = format.types;
  std::vector<Tensor> tensors;
  std::vector<int64_t> begins{0};
  for (Parameter& p : list) {
    Tensor tensor{};
    tensor.source.param = p.param.data();
    tensor.source.master = p.copy.empty() ? nullptr : p.copy.data();
    for (int j = 0; format.types.has_state(j); ++j) {
      tensor.source.states[j] = p.states[j].data();
      tensor.source.scales[j] = reinterpret_cast<float*>(p.scales[j].data());
    }
    tensor.source.step_count = &p.step;
    tensor.target = tensor.source;
    tensor.grad = p.grad.data();
    tensor.noise = {uint64_t(17 * p.n), 1000 * p.n, format.noise};
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

void expect_same(const Format& format, Isa isa, const List& got, const List& want) {
  for (size_t t = 0; t < got.size(); ++t) {
    bool same = got[t].param == want[t].param && got[t].copy == want[t].copy;
    for (int j = 0; j < 3; ++j) {
      same = same && got[t].states[j] == want[t].states[j] && got[t].scales[j] == want[t].scales[j];
    }
    expect(same, "%s: tensor %zu of %s differs from the scalar one", format.name, t, name_of(isa));
  }
}

}  // namespace

int main() {
  for (const Format& format : kFormats) {
    const List before = make_list(format.types);
    List expected = before;
    run(Isa::scalar, format, 1, expected);
    expect(expected.back().param != before.back().param, "%s: nothing has changed", format.name);
    for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
      if (isa > dsx::current_isa()) break;
      List list = before;
      run(isa, format, 3, list);
      expect_same(format, isa, list, expected);
    }
  }
  return finish();
}
