// Tests quantized_linear_cpu.cpp for codes of kBits in every ISA that this CPU has: memory that
// ends where the weight ends, against double, and bit for bit against the scalar ISA, however the
// columns are cut.
#include <cmath>
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "expect.h"
#include "linear/quantized_linear.h"

namespace {

using dsx::Dtype;
using dsx::Isa;
using dsx::QuantFormat;

struct Case {
  int64_t rows, columns, length;
  dsx::PackedWeight weight = {};
  std::vector<uint8_t> codes;
  std::vector<float> scales, offsets;
  Elements x, out;
  bool integer;

  Case(QuantFormat format, bool asymmetric, Dtype dtype, int64_t m, int64_t n, int64_t k,
       int64_t group, bool of_integers)
      : rows(m), columns(n), length(k), x(dtype, m * k), out(dtype, m * n), integer(of_integers) {
    weight.format = format;
    weight.rows = n, weight.length = k, weight.group = group;
    weight.row_bytes =
        (k * kBits / 8 + dsx::kPackedLineBytes) / dsx::kPackedLineBytes * dsx::kPackedLineBytes;
    weight.scale_pitch = (n + 3) / 4 * 4;
    codes.resize(size_t(n * weight.row_bytes));
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = uint8_t(i * 151 + i / 7);
    scales.resize(size_t(weight.groups() * weight.scale_pitch));
    offsets.resize(scales.size());
    for (size_t i = 0; i < scales.size(); ++i) {
      scales[i] = (1.5f + std::sin(float(i))) / (kBits == 8 ? 128 : 8);
      offsets[i] = -std::sin(float(i) * 0.3f);
    }
    weight.codes = codes.data(), weight.scales = scales.data();
    weight.offsets = asymmetric ? offsets.data() : nullptr;
    for (int64_t i = 0; i < m * k; ++i) x.set(i, std::sin(float(i) * 0.73f));
  }

  // As packed_weight.h draws it.
  double number(int64_t column, int64_t k) const {
    constexpr int64_t run = 128 / kBits, half = 16 / kBits;
    const int64_t i = k % run, word = i % 8 / 2, place = i / 8 + i % 2 * half;
    const int64_t bit = (k / run * 4 + word) * 32 + place * kBits;
    const int code =
        codes[size_t(column * weight.row_bytes + bit / 8)] >> bit % 8 & ((1 << kBits) - 1);
    if (weight.format == QuantFormat::nf4) return double(dsx::nf4_level(code));
    if (kBits == 4) return code - (weight.offsets ? 0 : 8);
    return int8_t(code) + (weight.offsets ? 128 : 0);
  }

  double element(int64_t column, int64_t k) const {
    const size_t at = size_t(k / weight.group * weight.scale_pitch + column);
    const double offset = weight.offsets ? double(offsets[at]) : 0;
    return number(column, k) * double(scales[at]) + offset;
  }

  std::vector<float> run(Isa isa, bool vnni, int64_t cut) {
    dsx::QuantizedLinear call = {};
    call.rows = rows, call.columns = columns, call.length = length, call.integer = integer;
    call.weight = weight;
    call.x = {x.address(), length, x.dtype()};
    call.out = {out.address(), columns, out.dtype()};
    quantized_linear_cpu(isa, vnni, call, 0, cut);
    quantized_linear_cpu(isa, vnni, call, cut, columns);
    std::vector<float> found;
    for (int64_t i = 0; i < rows * columns; ++i) found.push_back(out[i]);
    return found;
  }

  std::vector<float> unpacked(Isa isa) {
    std::vector<float> found(size_t(columns * length));
    unpack_weight_cpu(isa, weight, {found.data(), length, Dtype::float32}, 0, columns);
    return found;
  }

  void check(const std::vector<float>& got) const {
    // Of codes of x, which are off by half a step each.
    const double of_term = integer ? 0.5 / 127 : 1e-6;
    for (int64_t i = 0; i < rows * columns; ++i) {
      double want = 0, magnitude = 0;
      for (int64_t k = 0; k < length; ++k) {
        const double factor = double(x[i / columns * length + k]);
        want += factor * element(i % columns, k);
        magnitude += std::fabs(element(i % columns, k)) + 3;
      }
      const double rounding = out.dtype() == Dtype::float32 ? 1e-6 : 0.005;
      expect(std::fabs(double(got[size_t(i)]) - want) <=
                 of_term * magnitude + rounding * std::fabs(want),
             "[%ld] of %ld x %ld x %ld is %g, expected %g", long(i), long(rows), long(columns),
             long(length), double(got[size_t(i)]), want);
    }
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void test(QuantFormat format, bool asymmetric, Dtype dtype, int64_t m, int64_t n, int64_t k,
          int64_t group) {
  for (bool integer : {false, true}) {
    if (integer && format == QuantFormat::nf4) continue;
    Case made(format, asymmetric, dtype, m, n, k, group, integer);
    const std::vector<float> want = made.run(Isa::scalar, false, n);
    const std::vector<float> floats = made.unpacked(Isa::scalar);
    made.check(want);
    for (int64_t i = 0; i < n * k; ++i) {
      const double element = made.element(i / k, i % k);
      expect(std::fabs(double(floats[size_t(i)]) - element) <= 1e-7 * std::fabs(element),
             "element [%ld] is %g, expected %g", long(i), double(floats[size_t(i)]), element);
    }
    for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
      if (isa > dsx::current_isa()) break;
      expect(same(made.run(isa, false, n / 3), want), "%s: other bits for %ld x %ld x %ld",
             name_of(isa), long(m), long(n), long(k));
      expect(same(made.unpacked(isa), floats), "%s: other floats", name_of(isa));
    }
    if (dsx::current_vnni()) {
      expect(same(made.run(Isa::avx512, true, n / 3), want), "vnni: other bits");
    }
  }
}

}  // namespace

int main() {
  for (QuantFormat format : kFormats) {
    for (bool asymmetric : {false, true}) {
      if (asymmetric && format == QuantFormat::nf4) continue;
      test(format, asymmetric, Dtype::bfloat16, 1, 5, 128, 64);
      test(format, asymmetric, Dtype::float16, 7, 3, 33, 33);
      test(format, asymmetric, Dtype::float32, 2, 6, 41, 3);
      test(format, asymmetric, Dtype::float32, 3, 70, 96, 32);
      test(format, asymmetric, Dtype::bfloat16, 9, 2, 2048 + 77, 256);
      // Groups of which there is room for a part, beside rows for more than one vector.
      test(format, asymmetric, Dtype::float32, 3, 27, 17000, 9000);
    }
  }
  return finish();
}
