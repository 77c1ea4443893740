// Tests softmax_cpu.cpp and cross_entropy_cpu.cpp in every ISA that this CPU has: rows, masks and
// results that end where memory ends, against double, and bit for bit against the scalar ISA; with
// every kind of mask, strides of it, windows, and gradients in place of logits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "expect.h"
#include "softmax/cross_entropy.h"
#include "softmax/softmax.h"

namespace {

using dsx::Dtype;
using dsx::Isa;
using Kind = dsx::SoftmaxMask::Kind;

constexpr int64_t kHeads = 2, kQueries = 3, kRows = kHeads * kQueries;

struct Storage {
  Elements elements;
  int64_t count;

  Storage(Dtype dtype, int64_t n, float seed) : elements(dtype, n), count(n) {
    for (int64_t i = 0; i < n; ++i) elements.set(i, 4 * std::sin(seed + float(i) * 0.73f));
  }
  dsx::Rows rows(int64_t pitch) { return {elements.address(), pitch, elements.dtype()}; }
  double at(int64_t i) const { return double(elements[i]); }
};

double rounding(Dtype dtype) {
  return dtype == Dtype::float32 ? 0x1p-24 : dtype == Dtype::float16 ? 0x1p-11 : 0x1p-8;
}

struct Options {
  Kind kind = Kind::none;
  Dtype mask = Dtype::float32;
  int64_t column_stride = 1;
  bool is_biased = false;
  float soft_cap = 0;
  int64_t before = -1, after = -1;
};

struct SoftmaxCase {
  Options options;
  int64_t n;
  Storage x, grad_out, out, grad_x, added;
  std::vector<uint8_t> bytes;
  float slopes[kHeads] = {0.25f, 0.01f};

  SoftmaxCase(Dtype dtype, Options of, int64_t length)
      : options(of),
        n(length),
        x(dtype, kRows * n, 0),
        grad_out(dtype, kRows * n, 1),
        out(dtype, kRows * n, 2),
        grad_x(dtype, kRows * n, 3),
        added(of.mask, mask_size(), 4),
        bytes(size_t(mask_size())) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = uint8_t(i % 5 == 0 ? 0 : i);
  }

  // A mask for each query, the same for all heads, which ends where the last one is read.
  int64_t mask_pitch() const { return n * std::max<int64_t>(options.column_stride, 1); }
  int64_t mask_size() const {
    return (kQueries - 1) * mask_pitch() + (n - 1) * options.column_stride + 1;
  }
  int64_t mask_place(int64_t row, int64_t i) const {
    return row % kQueries * mask_pitch() + i * options.column_stride;
  }

  dsx::Scores scores() {
    dsx::Scores scores;
    scores.scale = 0.5f;
    scores.soft_cap = options.soft_cap;
    scores.queries = kQueries;
    scores.offset = n - kQueries;
    scores.before = options.before;
    scores.after = options.after;
    scores.mask.kind = options.kind;
    scores.mask.dtype = options.mask;
    scores.mask.column_stride = options.column_stride;
    scores.mask.data = options.kind == Kind::added ? added.elements.address() : bytes.data();
    scores.mask.rows.dims = 2;
    scores.mask.rows.sizes[0] = kQueries;
    scores.mask.rows.strides[0] = mask_pitch();
    scores.mask.rows.sizes[1] = kHeads;
    scores.mask.rows.strides[1] = 0;
    if (options.is_biased) scores.slopes = slopes;
    scores.slope_rows.dims = 2;
    scores.slope_rows.sizes[0] = kQueries;
    scores.slope_rows.strides[0] = 0;
    scores.slope_rows.sizes[1] = kHeads;
    scores.slope_rows.strides[1] = 1;
    return scores;
  }

  void run(Isa isa, int64_t cut) {
    dsx::Softmax call = {};
    call.rows = kRows;
    call.length = n;
    call.x = x.rows(n);
    call.out = out.rows(n);
    call.scores = scores();
    softmax_cpu(isa, call, 0, cut);
    softmax_cpu(isa, call, cut, kRows);
    dsx::SoftmaxBackward back = {};
    back.rows = kRows;
    back.length = n;
    back.grad_out = grad_out.rows(n);
    back.out = out.rows(n);
    if (options.soft_cap > 0) back.x = x.rows(n);
    back.grad_x = grad_x.rows(n);
    back.scores = call.scores;
    softmax_backward_cpu(isa, back, 0, cut);
    softmax_backward_cpu(isa, back, cut, kRows);
  }

  double score(int64_t row, int64_t i) const {
    const int64_t position = row % kQueries + n - kQueries;
    if (options.before >= 0 && i < position - options.before) return -INFINITY;
    if (options.after >= 0 && i > position + options.after) return -INFINITY;
    double score = 0.5 * x.at(row * n + i);
    const double cap = double(options.soft_cap);
    if (cap > 0) score = cap * std::tanh(score / cap);
    if (options.is_biased) score -= double(slopes[row / kQueries]) * double(std::abs(position - i));
    const int64_t place = mask_place(row, i);
    if (options.kind == Kind::added) return score + added.at(place);
    const bool is_zero = bytes[size_t(place)] == 0;
    if (options.kind == Kind::takes_part && is_zero) return -INFINITY;
    return options.kind == Kind::left_out && !is_zero ? -INFINITY : score;
  }

  void check() const {
    for (int64_t row = 0; row < kRows; ++row) {
      double sum = 0, dot = 0;
      for (int64_t i = 0; i < n; ++i) sum += std::exp(score(row, i));
      for (int64_t i = 0; i < n; ++i) dot += out.at(row * n + i) * grad_out.at(row * n + i);
      for (int64_t i = 0; i < n; ++i) {
        const double want = sum > 0 ? std::exp(score(row, i)) / sum : 0;
        compare("out", out, row * n + i, want, want);
        const double p = out.at(row * n + i), half = 0.5 * x.at(row * n + i);
        double grad = 0.5 * p * (grad_out.at(row * n + i) - dot);
        if (options.soft_cap > 0) grad *= 1 - std::pow(std::tanh(half / options.soft_cap), 2);
        compare("grad_x", grad_x, row * n + i, grad, 4 * p);
      }
    }
  }

  void compare(const char* what, const Storage& got, int64_t i, double want, double size) const {
    const double stored = rounding(got.elements.dtype()) * (std::fabs(want) + 6e-5);
    expect(std::fabs(got.at(i) - want) <= 2e-5 * size + 1.1 * stored + 1e-37,
           "%s[%ld] of %ld is %g, expected %g", what, long(i), long(n), got.at(i), want);
  }
};

struct EntropyCase {
  int64_t n;
  Storage logits, grad, in_place;
  std::vector<int64_t> targets;
  std::vector<float> losses, stats;
  float divisor = 4;

  EntropyCase(Dtype dtype, int64_t length)
      : n(length),
        logits(dtype, kRows * n, 0),
        grad(dtype, kRows * n, 1),
        in_place(dtype, kRows * n, 0),
        losses(kRows),
        stats(2 * kRows) {
    for (int64_t row = 0; row < kRows; ++row) targets.push_back(row == 2 ? -7 : row * 31 % n);
    targets.back() = n - 1;
  }

  void run(Isa isa, int64_t cut) {
    dsx::CrossEntropy call = {};
    call.rows = kRows;
    call.length = n;
    call.targets = targets.data();
    call.ignored = -7;
    call.label_smoothing = 0.1f;
    call.z_loss = 0.01f;
    call.divisor = &divisor;
    call.losses = losses.data();
    call.stats = stats.data();
    call.logits = call.grad = in_place.rows(n);
    cross_entropy_cpu(isa, call, 0, cut);
    cross_entropy_cpu(isa, call, cut, kRows);
    call.logits = logits.rows(n);
    call.grad = grad.rows(n);
    const float one = 1, two = 2;
    call.grad_loss = &two;
    cross_entropy_backward_cpu(isa, call, 0, kRows);
    const float halves[kRows] = {1, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f};
    scale_rows_cpu(isa, grad.rows(n), n, {halves, 1, &one}, 0, kRows);
  }

  void check() const {
    for (int64_t row = 0; row < kRows; ++row) {
      double sum = 0, mean = 0;
      for (int64_t i = 0; i < n; ++i) {
        sum += std::exp(logits.at(row * n + i));
        mean += logits.at(row * n + i) / double(n);
      }
      const int64_t target = targets[size_t(row)];
      const bool counts = target >= 0;
      const double whole = std::log(sum);
      double loss = 0;
      if (counts) loss = whole - 0.9 * logits.at(row * n + target) - 0.1 * mean;
      if (counts) loss += 0.01 * whole * whole;
      expect(std::fabs(double(losses[size_t(row)]) - loss) <= 1e-5 * (1 + std::fabs(whole)),
             "loss %ld of %ld is %g, expected %g", long(row), long(n), double(losses[size_t(row)]),
             loss);
      for (int64_t i = 0; i < n; ++i) {
        const double p = std::exp(logits.at(row * n + i)) / sum;
        double want = p * (1 + 0.02 * whole) - 0.1 / double(n) - (i == target ? 0.9 : 0);
        want = counts ? want / 4 : 0;
        const double stored = 2.2 * rounding(grad.elements.dtype()) * (std::fabs(want) + 6e-5);
        const double bound = 1e-5 + stored;
        expect(std::fabs(in_place.at(row * n + i) - want) <= bound, "gradient %g, expected %g",
               in_place.at(row * n + i), want);
        const double factor = row == 0 ? 2 : 1;
        expect(std::fabs(grad.at(row * n + i) - factor * want) <= 2 * bound,
               "gradient %g of %ld, expected %g", grad.at(row * n + i), long(n), factor * want);
      }
    }
  }
};

std::vector<float> all_of(std::initializer_list<const Storage*> results) {
  std::vector<float> all;
  for (const Storage* each : results) {
    for (int64_t i = 0; i < each->count; ++i) all.push_back(each->elements[i]);
  }
  return all;
}

void expect_same(Isa isa, int64_t n, const std::vector<float>& got,
                 const std::vector<float>& want) {
  expect(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0,
         "%s: other bits for length %ld", name_of(isa), long(n));
}

void test(Dtype dtype, const Options& options, int64_t n) {
  SoftmaxCase scalar(dtype, options, n);
  scalar.run(Isa::scalar, 3);
  scalar.check();
  for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    SoftmaxCase other(dtype, options, n);
    other.run(isa, 1);
    expect_same(isa, n, all_of({&other.out, &other.grad_x}), all_of({&scalar.out, &scalar.grad_x}));
  }
}

void test_entropy(Dtype dtype, int64_t n) {
  EntropyCase scalar(dtype, n);
  scalar.run(Isa::scalar, 3);
  scalar.check();
  for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    EntropyCase other(dtype, n);
    other.run(isa, 1);
    expect_same(isa, n, all_of({&other.grad, &other.in_place}),
                all_of({&scalar.grad, &scalar.in_place}));
    expect_same(isa, n, other.losses, scalar.losses);
  }
}

}  // namespace

int main() {
  const Options options[] = {
      {},
      {.soft_cap = 3},
      {.is_biased = true, .after = 0},
      {.before = 20, .after = 3},
      {.before = 0, .after = 0},
      {.kind = Kind::takes_part},
      {.kind = Kind::left_out, .column_stride = 0},
      {.kind = Kind::takes_part, .column_stride = 3, .before = 70},
      {.kind = Kind::added},
      {.kind = Kind::added, .mask = Dtype::bfloat16, .column_stride = 2},
      {.kind = Kind::added, .mask = Dtype::float16, .column_stride = 0, .is_biased = true},
  };
  for (int64_t n : {1, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 100, 257}) {
    for (Dtype dtype : kDtypes) {
      for (const Options& each : options) test(dtype, each, n);
      test_entropy(dtype, n);
    }
  }
  for (const Options& each : {options[0], options[7]}) test(Dtype::bfloat16, each, 33'001);
  return finish();
}
