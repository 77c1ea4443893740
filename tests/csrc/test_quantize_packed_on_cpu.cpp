// Tests the CUDA kernel of quantize_packed on the CPU: it must write what the CPU's writes, and
// read and write nothing else.
#include "cuda_on_cpu.h"

#include "kernel_on_cpu.inc"

#include <random>

#include "dtypes.h"
#include "expect.h"

namespace {

using dsx::QuantFormat;
using dsx::QuantizePacked;

struct Case {
  QuantFormat format;
  bool asymmetric;
  dsx::Dtype dtype;
  int64_t rows, length, group, gap;  // gap: elements between rows
};

// What a call writes, and nothing around it.
struct Written {
  std::vector<uint8_t> codes;
  std::vector<float> scales, offsets;
  std::vector<double> errors;
};

Written written_by(const Case& c, void* x, bool cuda) {
  QuantizePacked call = {};
  call.rows = c.rows, call.length = c.length, call.group = c.group, call.group_rows = 1;
  call.format = c.format, call.asymmetric = c.asymmetric;
  call.x = {x, c.length + c.gap, c.dtype};
  const int64_t bytes = dsx::ceil_div(c.length * dsx::bits_of_code(c.format), 8);
  call.row_bytes = dsx::ceil_div(bytes, dsx::kPackedLineBytes) * dsx::kPackedLineBytes;
  call.scale_pitch = call.padded_rows();
  const size_t scales = size_t(call.columns() * call.scale_pitch);
  Written to{std::vector<uint8_t>(size_t(c.rows * call.row_bytes)), std::vector<float>(scales, -7),
             std::vector<float>(scales, -7), std::vector<double>(size_t(2 * c.rows))};
  call.codes = to.codes.data(), call.scales = to.scales.data(), call.errors = to.errors.data();
  call.offsets = c.asymmetric ? to.offsets.data() : nullptr;
  if (cuda) {
    dsx::quantize_packed_cuda(call, nullptr);
  } else {
    dsx::quantize_packed_cpu(dsx::current_isa(), call, 0, c.rows);
  }
  return to;
}

template <class T>
bool are_same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void test(const Case& c, std::mt19937& random) {
  const int64_t count = (c.rows - 1) * (c.length + c.gap) + c.length;
  const size_t bytes = size_t(count * bytes_of(c.dtype));
  // The last element is the last of the memory; the first one is aligned where the case allows it.
  std::unique_ptr<char, void (*)(void*)> x(
      static_cast<char*>(std::aligned_alloc(16, (bytes + 15) / 16 * 16)), std::free);
  char* const begin = x.get() + (bytes + 15) / 16 * 16 - bytes;
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < count; ++i) write(c.dtype, begin, i, normal(random));
  if (random() % 3 == 0) write(c.dtype, begin, int64_t(random() % uint64_t(count)), NAN);
  const Written want = written_by(c, begin, false), got = written_by(c, begin, true);
  const auto named = [&](const char* what, bool same) {
    expect(same, "%s of format %d, offsets %d, %s, %ld x %ld in groups of %ld, %ld apart", what,
           int(c.format), c.asymmetric, kDtypeNames[int(c.dtype)], long(c.rows), long(c.length),
           long(c.group), long(c.gap));
  };
  named("codes", are_same(want.codes, got.codes));
  named("scales", are_same(want.scales, got.scales));
  named("offsets", are_same(want.offsets, got.offsets));
  for (size_t i = 0; i < want.errors.size(); ++i) {
    const double a = want.errors[i], b = got.errors[i];
    const double bound = i % 2 == 0 ? 0 : 0x1p-15 * a;  // sums are in another order
    named(i % 2 == 0 ? "largest error" : "squares",
          std::isnan(a) ? std::isnan(b) : std::abs(a - b) <= bound);
  }
}

}  // namespace

// Of every so many cases, as the argument says, one.
int main(int count, char** arguments) {
  const int step = count > 1 ? std::atoi(arguments[1]) : 1;
  std::mt19937 random(0);
  const int64_t lengths[] = {1, 31, 32, 33, 64, 256, 1000, 1024, 1056, 4128};
  const int64_t groups[] = {1, 7, 16, 32, 33, 64, 96, 128, 256, 1024, 2048, 5000};
  const QuantFormat formats[] = {QuantFormat::int8, QuantFormat::int4, QuantFormat::nf4};
  int number = 0;
  for (int64_t length : lengths) {
    for (int64_t group : groups) {
      if (++number % step != 0) continue;
      const QuantFormat format = formats[number % 3];
      const int64_t rows = 1 + number % 3, gap = number % 4 == 0 ? number % 5 : number % 2 * 16;
      test({format, format != QuantFormat::nf4 && number % 2 == 0, kDtypes[number / 3 % 3], rows,
            length, std::min(group, length), gap},
           random);
    }
  }
  return finish();
}
