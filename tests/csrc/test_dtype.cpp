// Tests common/dtype.h: all values of each 16-bit type, and rounding at and beside every edge.
#include "common/dtype.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "expect.h"
#include "samples.h"

namespace {

using dsx::BFloat16;
using dsx::Half;

template <class T>
constexpr uint16_t kInfinity = 0;
template <>
constexpr uint16_t kInfinity<Half> = 0x7c00;
template <>
constexpr uint16_t kInfinity<BFloat16> = 0x7f80;

template <class T>
void test_widening() {
  for (int pattern = 0; pattern <= UINT16_MAX; ++pattern) {
    const float value = dsx::to_float(T{uint16_t(pattern)});
    const int magnitude = pattern & 0x7fff;
    const bool negative = pattern > 0x7fff;
    if (magnitude > kInfinity<T>) {
      expect(std::isnan(value), "%#x stays NaN", pattern);
    } else if (magnitude == kInfinity<T>) {
      expect(value == (negative ? -INFINITY : INFINITY), "%#x stays infinite", pattern);
    } else {
      const double expected = value_of<T>(uint16_t(pattern));
      expect(value == expected, "%#x is %a, expected %a", pattern, value, expected);
      expect(std::signbit(value) == negative, "%#x keeps its sign", pattern);
    }
  }
}

// The nearest of all values of T, by distance in double; of two, the one with an even pattern.
template <class T>
uint16_t nearest(const std::vector<double>& magnitudes, float value) {
  const double magnitude = std::fabs(double(value));
  const auto above = std::lower_bound(magnitudes.begin(), magnitudes.end(), magnitude);
  int pattern = int(above - magnitudes.begin());
  if (above == magnitudes.end()) {
    pattern = kInfinity<T>;
  } else if (pattern > 0) {
    const double distance_below = magnitude - magnitudes[pattern - 1];
    const double distance_above = magnitudes[pattern] - magnitude;
    const bool below_is_even = pattern % 2 == 1;
    if (distance_below < distance_above || (distance_below == distance_above && below_is_even)) {
      --pattern;
    }
  }
  return uint16_t(pattern | (std::signbit(value) ? 0x8000 : 0));
}

template <class T>
void test_narrowing(const std::vector<float>& samples) {
  std::vector<double> magnitudes;  // up to where infinity begins, which rounds like a number
  for (int pattern = 0; pattern <= kInfinity<T>; ++pattern) {
    magnitudes.push_back(value_of<T>(uint16_t(pattern)));
  }
  for (float value : samples) {
    const uint16_t expected = std::isnan(value) ? T::kQuietNan : nearest<T>(magnitudes, value);
    const uint16_t bits = dsx::from_float<T>(value).bits;
    expect(bits == expected, "%a becomes %#x, expected %#x", value, bits, expected);
  }
}

}  // namespace

int main() {
  const std::vector<float> samples = conversion_samples();
  test_widening<Half>();
  test_widening<BFloat16>();
  test_narrowing<Half>(samples);
  test_narrowing<BFloat16>(samples);
  return finish();
}
