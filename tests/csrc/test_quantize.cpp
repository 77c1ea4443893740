// Tests quantize_cpu.cpp in every ISA that this CPU has: the same codes,
// scales and floats as in plain C++, however the work is cut, and nothing is touched beyond them.
#include <algorithm>
#include <random>
#include <vector>

#include "dtypes.h"
#include "expect.h"
#include "quantization/quantize.h"

namespace {

using dsx::Dtype;
using dsx::Isa;
using dsx::QuantFormat;

struct Case {
  QuantFormat format;
  bool asymmetric;
  int64_t rows, length, group;
  Dtype dtype;
};

// All that is made of the same random numbers.
struct Made {
  std::vector<uint8_t> codes;
  std::vector<float> scales, offsets, values;

  bool operator==(const Made& other) const {
    return codes == other.codes && scales == other.scales && offsets == other.offsets &&
           values == other.values;
  }
};

dsx::Rows rows_of(Elements& elements, const Case& c) {
  dsx::Rows found{};
  found.data = elements.address();
  found.dtype = elements.dtype();
  found.pitch = c.length;
  return found;
}

Made quantized(Isa isa, const Case& c, int64_t step) {
  Elements x(c.dtype, c.rows * c.length), out(c.dtype, c.rows * c.length);
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < c.rows * c.length; ++i) x.set(i, normal(random));
  dsx::Quantize call{};
  call.rows = c.rows;
  call.length = c.length;
  call.group = c.group;
  call.group_rows = 1;
  call.format = c.format;
  call.asymmetric = c.asymmetric;
  Made made;
  made.codes.resize(size_t(c.rows * dsx::bytes_of_row(c.format, c.length)));
  made.scales.resize(size_t(call.bands() * call.columns()));
  made.offsets.resize(c.asymmetric ? made.scales.size() : 0);
  call.scales = made.scales.data();
  call.offsets = c.asymmetric ? made.offsets.data() : nullptr;
  call.x = rows_of(x, c);
  call.codes = made.codes.data();
  const int64_t tasks = dsx::QuantizeTasks(call, false).count(call);
  for (int64_t i = 0; i < tasks; i += step) {
    dsx::quantize_cpu(isa, call, false, i, std::min(i + step, tasks));
  }
  dsx::Dequantize back{};
  static_cast<dsx::Groups&>(back) = call;
  back.codes = made.codes.data();
  back.out = rows_of(out, c);
  dsx::dequantize_cpu(isa, back, 0, dsx::QuantizeTasks(back, true).count(back));
  for (int64_t i = 0; i < c.rows * c.length; ++i) made.values.push_back(out[i]);
  return made;
}

void test_quantize(const Case& c) {
  const Made want = quantized(Isa::scalar, c, 1 << 20);
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) continue;
    for (int64_t step : {int64_t{1}, int64_t{1} << 20}) {
      expect(quantized(isa, c, step) == want, "%s: other codes of format %d, length %ld, group %ld",
             dsx::name_of(isa), int(c.format), long(c.length), long(c.group));
    }
  }
}

}  // namespace

int main() {
  for (int format = 0; format < int(dsx::kQuantFormats); ++format) {
    for (bool asymmetric : {false, true}) {
      if (asymmetric && format > int(QuantFormat::int4)) continue;
      for (Dtype dtype : kDtypes) {
        for (int64_t length : {1, 2, 31, 64, 77, 300}) {
          for (int64_t group : {int64_t{1}, int64_t{20}, int64_t{64}, length}) {
            test_quantize({QuantFormat(format), asymmetric, 3, length, group, dtype});
          }
        }
      }
    }
  }
  return finish();
}
