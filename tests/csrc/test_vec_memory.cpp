// Tests Vec::load and store of every ISA that this CPU has: conversions as common/dtype.h does
// them, tails of every length beside a page that must not be touched, every kind of pointer.
#include <cmath>
#include <vector>

#include "expect.h"
#include "flush.h"
#include "guarded.h"
#include "samples.h"

#define DSX_KERNEL_SOURCE "vec_memory.inl"
#include "common/simd/foreach_isa.h"

namespace {

using dsx::Any;
using dsx::BFloat16;
using dsx::Dtype;
using dsx::Half;
using dsx::Isa;
using dsx::Pointer;

constexpr int kMaxLanes = 16;

template <class T>
constexpr Dtype kDtype = Dtype::float32;
template <>
constexpr Dtype kDtype<BFloat16> = Dtype::bfloat16;
template <>
constexpr Dtype kDtype<Half> = Dtype::float16;

template <class T>
struct Conversions {  // all 65,536 values of T widened, the samples narrowed, by dtype.h
  std::vector<T> all, narrowed;
  std::vector<float> widened, samples;

  Conversions() : samples(conversion_samples()) {
    for (int bits = 0; bits <= UINT16_MAX; ++bits) {
      all.push_back({uint16_t(bits)});
      widened.push_back(dsx::to_float(all.back()));
    }
    for (float sample : samples) narrowed.push_back(dsx::from_float<T>(sample));
  }
};

template <class T>
void test_conversions(Isa isa, const Conversions<T>& expected) {
  const int64_t values = int64_t(expected.all.size());
  const int64_t samples = int64_t(expected.samples.size());
  std::vector<float> widened(expected.all.size());
  std::vector<T> narrowed(expected.samples.size());
  DSX_DISPATCH_ISA(isa, convert(expected.all.data(), widened.data(), values));
  DSX_DISPATCH_ISA(isa, convert(expected.samples.data(), narrowed.data(), samples));
  for (size_t i = 0; i < widened.size(); ++i) {
    const bool nan = std::isnan(expected.widened[i]);
    expect(nan ? std::isnan(widened[i])
               : dsx::bits_of(widened[i]) == dsx::bits_of(expected.widened[i]),
           "%s: %#zx is %a, expected %a", name_of(isa), i, widened[i], expected.widened[i]);
  }
  for (size_t i = 0; i < narrowed.size(); ++i) {
    expect(narrowed[i].bits == expected.narrowed[i].bits, "%s: %a becomes %#x, expected %#x",
           name_of(isa), expected.samples[i], narrowed[i].bits, expected.narrowed[i].bits);
  }
}

// Loads and stores `count` elements that end at the guard, through the pointer that `wrap` makes.
template <class T, class Wrap>
void test_tail(Isa isa, int size, int count, const Wrap& wrap) {
  Guarded memory;
  T* const elements = memory.last<T>(count);
  T& neighbour = elements[-1];
  neighbour = dsx::from_float<T>(7);
  for (int i = 0; i < count; ++i) elements[i] = dsx::from_float<T>(float(i + 1));

  float lanes[kMaxLanes];
  DSX_DISPATCH_ISA(isa, load_lanes(wrap(elements), count, lanes));
  for (int i = 0; i < size; ++i) {
    const float expected = i < count ? float(i + 1) : 0.0f;
    expect(dsx::bits_of(lanes[i]) == dsx::bits_of(expected), "%s: lane %d of %d loaded is %a",
           name_of(isa), i, count, lanes[i]);
  }

  for (int i = 0; i < count; ++i) lanes[i] = float(100 + i);
  DSX_DISPATCH_ISA(isa, convert(static_cast<const float*>(lanes), wrap(elements), count));
  for (int i = 0; i < count; ++i) {
    expect(dsx::to_float(elements[i]) == float(100 + i), "%s: element %d of %d stored is %a",
           name_of(isa), i, count, dsx::to_float(elements[i]));
  }
  expect(dsx::to_float(neighbour) == 7, "%s: the element before is kept", name_of(isa));
}

// A store of `count` lanes leaves the elements after them as they were.
template <class T>
void test_store_ends(Isa isa, int size, int count) {
  T elements[kMaxLanes];
  for (T& element : elements) element = dsx::from_float<T>(7);
  const std::vector<float> ones(size_t(count), 1.0f);
  DSX_DISPATCH_ISA(isa, convert(ones.data(), elements, count));
  for (int i = 0; i < size; ++i) {
    expect(dsx::to_float(elements[i]) == (i < count ? 1 : 7), "%s: element %d after a store of %d",
           name_of(isa), i, count);
  }
}

template <class T>
void test_tails(Isa isa) {
  const int size = DSX_DISPATCH_ISA(isa, lanes_of_vec());
  for (int count = 1; count <= size; ++count) {
    test_tail<T>(isa, size, count, [](T* address) { return address; });
    test_tail<T>(isa, size, count, [](T* address) { return Pointer<T>{address}; });
    test_tail<T>(isa, size, count, [](T* address) { return Pointer<Any>{address, kDtype<T>}; });
    test_store_ends<T>(isa, size, count);
  }
}

}  // namespace

int main() {
  const Conversions<Half> half;
  const Conversions<BFloat16> bfloat16;
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    std::printf("%s\n", name_of(isa));
    test_tails<float>(isa);
    test_tails<BFloat16>(isa);
    test_tails<Half>(isa);
    for (bool flush : {false, true}) {
      flush_subnormals(flush);
      test_conversions(isa, half);
      test_conversions(isa, bfloat16);
      flush_subnormals(false);
    }
  }
  return finish();
}
