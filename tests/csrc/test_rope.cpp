// Tests rope_cpu.cpp in every ISA that this CPU has: heads that end where memory ends, against
// double, bit for bit against the scalar ISA, in place and not.
#include <cmath>
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "expect.h"
#include "attention/cache/rope.h"

namespace {

using dsx::Dtype;
using dsx::Isa;

constexpr int64_t kTokens = 19, kHeads = 3;
constexpr int64_t kPositions[kTokens] = {
    0, 1, 2,  3,  -1, 1000000, 16777217, 2147483647, -123456789, 7,
    8, 9, 10, 11, 12, 13,      14,       15,         1ll << 40};

struct Case {
  int64_t width, pairs;
  Elements q, q_out;
  std::vector<double> frequencies;

  Case(Dtype dtype, int64_t of_width, int64_t of_pairs)
      : width(of_width),
        pairs(of_pairs),
        q(dtype, kTokens * kHeads * width),
        q_out(dtype, kTokens * kHeads * width),
        frequencies(size_t(pairs)) {
    for (int64_t i = 0; i < count(); ++i) q.set(i, std::sin(float(i) * 0.73f));
    for (int64_t j = 0; j < pairs; ++j) {
      frequencies[size_t(j)] = std::pow(1e-4, double(j) / double(pairs));
    }
  }

  int64_t count() const { return kTokens * kHeads * width; }

  std::vector<float> run(Isa isa, int64_t cut, bool interleaved, bool negative, bool in_place) {
    const dsx::Heads source{q.address(), kHeads, 0, kHeads * width, width, q.dtype()};
    dsx::Heads target = source;
    if (!in_place) target.data = q_out.address();
    const dsx::Positions positions{kPositions, true, 0, 1};
    const dsx::Rope call{1,        kTokens,  width,  pairs,     interleaved,
                         negative, in_place, 2.0f,   positions, {frequencies.data(), true},
                         source,   {},       target, {}};
    rope_cpu(isa, call, 0, cut);
    rope_cpu(isa, call, cut, kTokens);
    std::vector<float> found;
    for (int64_t i = 0; i < count(); ++i) found.push_back(in_place ? q[i] : q_out[i]);
    return found;
  }

  void check(const std::vector<float>& got, bool interleaved, bool negative) const {
    const double rounding = q.dtype() == Dtype::float32   ? 0x1p-24
                            : q.dtype() == Dtype::float16 ? 0x1p-11
                                                          : 0x1p-8;
    for (int64_t i = 0; i < count(); ++i) {
      const int64_t token = i / (kHeads * width), k = i % width, head = i - k;
      double want = double(q[i]), position = double(kPositions[token]), error = 0;
      if (k < 2 * pairs) {
        const int64_t pair = interleaved ? k / 2 : k % pairs;
        const bool first = interleaved ? k % 2 == 0 : k < pairs;
        const int64_t one = head + (interleaved ? 2 * pair : pair);
        const int64_t other = interleaved ? one + 1 : one + pairs;
        const double frequency = frequencies[size_t(pair)];
        const long double angle = (negative ? -1 : 1) * (long double)position * frequency;
        const double a = double(q[one]), b = double(q[other]);
        const double c = double(std::cos(angle)), s = double(std::sin(angle));
        want = 2 * (first ? a * c - b * s : b * c + a * s);
        error = 4 * (8 * 0x1p-24 + std::fabs(position) * frequency * 0x1p-52);
      }
      expect(std::fabs(double(got[size_t(i)]) - want) <= error + 4 * rounding,
             "element %ld of width %ld is %g, expected %g", long(i), long(width),
             double(got[size_t(i)]), want);
    }
  }
};

void test(Dtype dtype, int64_t width, int64_t pairs, bool interleaved, bool negative) {
  Case scalar(dtype, width, pairs);
  const std::vector<float> want = scalar.run(Isa::scalar, 7, interleaved, negative, false);
  scalar.check(want, interleaved, negative);
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    for (bool in_place : {false, true}) {
      Case other(dtype, width, pairs);
      const std::vector<float> got = other.run(isa, 18, interleaved, negative, in_place);
      expect(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0,
             "%s: other bits for width %ld", name_of(isa), long(width));
    }
  }
}

}  // namespace

int main() {
  const int64_t shapes[][2] = {{2, 1}, {7, 3}, {16, 8}, {34, 17}, {80, 16}, {128, 64}, {520, 259}};
  for (const auto& [width, pairs] : shapes) {
    for (Dtype dtype : kDtypes) {
      for (bool interleaved : {false, true}) test(dtype, width, pairs, interleaved, width > 20);
    }
  }
  return finish();
}
