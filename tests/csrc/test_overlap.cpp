// Tests common/overlap.h against sets of bytes: of tensors with any strides, which overlap, touch,
// interleave, repeat their own elements or are empty.
#include "common/overlap.h"

#include <random>
#include <set>
#include <vector>

#include "expect.h"

namespace {

char memory[4096];

struct Tensor {
  std::vector<int64_t> sizes, strides;
  int64_t offset, element_bytes;

  explicit Tensor(std::mt19937& random) {
    constexpr int64_t kStrides[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 48, 96};
    const size_t dims = random() % 5;
    element_bytes = 1 << random() % 3;
    offset = random() % 120;
    for (size_t i = 0; i < dims; ++i) {
      sizes.push_back(random() % 40 == 0 ? 0 : 1 + random() % 5);
      strides.push_back(kStrides[random() % std::size(kStrides)]);
    }
  }

  dsx::StridedBytes strided() const {
    return {memory + offset, element_bytes, sizes.data(), strides.data(), int64_t(sizes.size())};
  }

  std::set<int64_t> bytes() const {
    std::set<int64_t> places{0}, all;
    for (size_t i = 0; i < sizes.size(); ++i) {
      std::set<int64_t> next;
      for (int64_t place : places) {
        for (int64_t k = 0; k < sizes[i]; ++k) next.insert(place + k * strides[i]);
      }
      places = next;
    }
    for (int64_t place : places) {
      for (int64_t b = 0; b < element_bytes; ++b) all.insert(offset + place * element_bytes + b);
    }
    return all;
  }
};

void test_any() {
  std::mt19937 random(0);
  int found[2] = {};
  for (int i = 0; i < 20'000; ++i) {
    const Tensor a(random), b(random);
    const std::set<int64_t> of_a = a.bytes(), of_b = b.bytes();
    bool want = false;
    for (int64_t byte : of_a) want |= of_b.count(byte) > 0;
    expect(dsx::overlap(a.strided(), b.strided()) == want, "case %d: expected %d", i, want);
    ++found[want];
  }
  expect(found[0] > 5000 && found[1] > 5000, "%d apart, %d not", found[0], found[1]);
}

// Slices of a projection of any size, and what would be too many places to look at one by one. Only
// their addresses are looked at, so that nothing has to be there.
void test_large() {
  const int64_t tokens = int64_t(1) << 40, of_token = 3 * 4096;
  const int64_t sizes[] = {tokens, 32, 128}, strides[] = {of_token, 128, 1};
  const auto slice = [&](int64_t begin) {
    const auto address = uintptr_t(1) << 20;
    const auto* data = reinterpret_cast<const void*>(address + uintptr_t(2 * begin));
    return dsx::StridedBytes(data, 2, sizes, strides, 3);
  };
  expect(!dsx::overlap(slice(0), slice(4096)), "slices side by side are apart");
  expect(dsx::overlap(slice(0), slice(4095)), "slices with an element in common overlap");
  expect(!dsx::overlap(slice(0), slice(2 * 4096)), "the third slice is apart");
  expect(dsx::overlap(slice(0), slice(2 * 4096 + 1)), "a slice overlaps the next token's");
}

}  // namespace

int main() {
  test_any();
  test_large();
  return finish();
}
