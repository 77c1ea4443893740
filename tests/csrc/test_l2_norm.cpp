// Tests l2_norm_cpu.cpp in every ISA that this CPU has: the sums of squares of every storage type
// against long double; the same bits in every ISA and however the row of tensors is cut.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "optimizers/chunks.h"
#include "dtypes.h"
#include "expect.h"
#include "flush.h"
#include "optimizers/l2_norm.h"

namespace {

using dsx::Dtype;
using dsx::Isa;

constexpr int64_t kChunk = dsx::kReductionChunk;

struct Row {
  std::vector<Elements> elements;
  std::vector<dsx::NormTensor> tensors;
  std::vector<int64_t> begins{0};
  std::vector<int64_t> first_chunk{0};

  // Element i of every tensor is value(i).
  template <class Value>
  Row(const std::vector<int64_t>& sizes, const Value& value) {
    for (int64_t n : sizes) {
      for (Dtype dtype : kDtypes) {
        elements.emplace_back(dtype, n);
        for (int64_t i = 0; i < n; ++i) elements.back().set(i, value(i));
        begins.push_back(begins.back() + n);
        first_chunk.push_back(first_chunk.back() + (n + kChunk - 1) / kChunk);
      }
    }
    for (size_t t = 0; t < elements.size(); ++t) {
      tensors.push_back({elements[t].address(), begins[t + 1] - begins[t], elements[t].dtype()});
    }
  }

  // Of all chunks, worked out for the ranges between neighbouring cuts.
  std::vector<double> squares(Isa isa, std::vector<int64_t> cuts = {}) const {
    cuts.insert(cuts.begin(), 0);
    cuts.push_back(begins.back());
    std::vector<double> result(size_t(first_chunk.back()), -1);
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      squares_of_chunks_cpu(isa, tensors.data(), begins.data(), first_chunk.data(),
                            int64_t(tensors.size()), cuts[i], cuts[i + 1], result.data());
    }
    return result;
  }

  double expected(size_t tensor, int64_t chunk) const {
    long double sum = 0;
    const int64_t end = std::min(tensors[tensor].n, (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk; i < end; ++i) {
      sum += static_cast<long double>(elements[tensor][i]) * elements[tensor][i];
    }
    return double(sum);
  }
};

std::vector<Isa> isas() {
  std::vector<Isa> found;
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa <= dsx::current_isa()) found.push_back(isa);
  }
  return found;
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Against the definition, within `error` of each sum, and the same bits in every ISA.
void test_row(const char* name, const Row& row, double error) {
  const std::vector<double> scalar = row.squares(Isa::scalar);
  for (size_t t = 0; t < row.tensors.size(); ++t) {
    for (int64_t chunk = row.first_chunk[t]; chunk < row.first_chunk[t + 1]; ++chunk) {
      const double want = row.expected(t, chunk - row.first_chunk[t]);
      const double got = scalar[size_t(chunk)];
      const bool right =
          std::isfinite(want) ? std::fabs(got - want) <= error * want : !std::isfinite(got);
      expect(right, "%s: %s of %ld elements: squares are %a, expected %a", name,
             kDtypeNames[int(row.tensors[t].dtype)], long(row.tensors[t].n), got, want);
    }
  }
  for (Isa isa : isas()) {
    const std::vector<double> squares = row.squares(isa);
    for (size_t i = 0; i < squares.size(); ++i) {
      expect(same(squares[i], scalar[i]), "%s: %s: squares of chunk %zu are %a, expected %a", name,
             name_of(isa), i, squares[i], scalar[i]);
    }
  }
}

// In float a square and three sums are rounded; what remains in double does not count.
constexpr double kFloat = 4.001 * 0x1p-24;
constexpr double kDouble = 1e-12;

void test_values() {
  const std::vector<int64_t> sizes{
      0,   1,    7,      8, 9,  15,  16,  17,         127,    128,        129,
      200, 1000, kChunk, 0, 33, 255, 257, kChunk - 1, kChunk, kChunk + 1, 2 * kChunk + 77};
  const auto wave = [](int64_t i) { return std::sin(float(i) * 0.37f) * float(1 + i % 13); };
  test_row("waves", Row(sizes, wave), kFloat);
  const std::vector<int64_t> few{1, 3, 130, 5000, kChunk + 130};
  for (float scale : {2.5e37f, 1e19f, 1e-15f}) {
    test_row("of one scale", Row(few, [&](int64_t i) { return scale * wave(i + 1); }), kFloat);
  }
  for (float scale : {1e-18f, 1e-25f, 1e-40f}) {  // Half and BFloat16 have 0 instead of some
    test_row("tiny", Row(few, [&](int64_t i) { return scale * wave(i + 1); }), kFloat);
  }
  test_row("zero", Row(few, [](int64_t) { return -0.0f; }), 0);
  test_row("one tiny", Row(few, [](int64_t i) { return i == 0 ? 0x1p-24f : 0; }), kDouble);
  test_row("one huge", Row(few, [](int64_t i) { return i % 99 == 1 ? 3e38f : 1; }), kDouble);
}

void test_not_finite() {
  for (float bad : {INFINITY, -INFINITY, NAN}) {
    for (int64_t at : {0, 127, 128, 5000}) {
      const Row row({5001}, [&](int64_t i) { return i == at ? bad : 1e-3f; });
      test_row("not finite", row, 0);
      for (double square : row.squares(dsx::current_isa())) {
        expect(!std::isfinite(square), "%g at %ld: squares are %g", double(bad), long(at), square);
      }
    }
  }
}

void test_cuts() {
  const Row row({5, kChunk + 1, 0, 300, 2 * kChunk}, [](int64_t i) { return float(i % 101); });
  const std::vector<double> whole = row.squares(dsx::current_isa());
  std::mt19937 random(0);
  std::uniform_int_distribution<int64_t> place(0, row.begins.back());
  for (int round = 0; round < 5; ++round) {
    std::vector<int64_t> cuts;
    for (int i = 0; i < 3; ++i) cuts.push_back(place(random));
    std::sort(cuts.begin(), cuts.end());
    expect(row.squares(dsx::current_isa(), cuts) == whole, "cuts at %ld, %ld, %ld change a sum",
           long(cuts[0]), long(cuts[1]), long(cuts[2]));
  }
}

// A thread that flushes subnormals to zero loses squares below 2^-126, and the sum must not feel
// it.
void test_flushing() {
  const Row row({kChunk}, [](int64_t i) { return i % 2 == 0 ? 0x1p-63f : 1.9f * 0x1p-64f; });
  for (Isa isa : isas()) {
    flush_subnormals(true);
    const std::vector<double> squares = row.squares(isa);
    flush_subnormals(false);
    for (size_t t = 0; t < 2; ++t) {  // float and BFloat16
      const double want = row.expected(t, 0);
      expect(std::fabs(squares[t] - want) <= kFloat * want, "%s flushing: squares are %a, not %a",
             name_of(isa), squares[t], want);
    }
  }
}

}  // namespace

int main() {
  test_values();
  test_not_finite();
  test_cuts();
  test_flushing();
  return finish();
}
