// Tests fingerprint_cpu.cpp in every ISA that this CPU has: the same bits at every address, however
// the row of tensors is cut, and nothing is read beyond the bytes; each changed byte is seen.
#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "expect.h"
#include "optimizers/fingerprint.h"

namespace {

using dsx::Isa;
using dsx::kBlockBytes;
using dsx::kRowBytes;

std::vector<Isa> isas() {
  std::vector<Isa> found;
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa <= dsx::current_isa()) found.push_back(isa);
  }
  return found;
}

struct Row {
  std::vector<std::vector<char>> memory;  // ends where the allocation does
  std::vector<dsx::Bytes> tensors;
  std::vector<int64_t> begins{0};

  // The same bytes for every `start`, which is how far behind the allocation they begin.
  Row(const std::vector<int64_t>& sizes, int start) {
    std::mt19937 random(0);
    for (int64_t n : sizes) {
      memory.emplace_back(size_t(n + start));
      for (int64_t i = 0; i < n; ++i) memory.back()[size_t(start + i)] = char(random());
      begins.push_back(begins.back() + n);
    }
    for (size_t t = 0; t < sizes.size(); ++t)
      tensors.push_back({memory[t].data() + start, sizes[t]});
  }

  std::vector<uint64_t> fingerprints(Isa isa, std::vector<int64_t> cuts = {}) const {
    cuts.insert(cuts.begin(), 0);
    cuts.push_back(begins.back());
    std::vector<uint64_t> found(tensors.size());
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      add_fingerprints_cpu(isa, tensors.data(), begins.data(), int64_t(tensors.size()), cuts[i],
                           cuts[i + 1], found.data());
    }
    return found;
  }
};

const std::vector<int64_t> kSizes{
    0, 1, 3, 4, kRowBytes - 1, kRowBytes, 7, kBlockBytes, 5 * kRowBytes + 2, 3 * kBlockBytes + 9};

void test_everywhere() {
  const std::vector<uint64_t> want = Row(kSizes, 0).fingerprints(Isa::scalar);
  for (Isa isa : isas()) {
    for (int start : {0, 1, 2, 4, 7}) {
      expect(Row(kSizes, start).fingerprints(isa) == want, "%s, from %d: other fingerprints",
             name_of(isa), start);
    }
  }
}

void test_cuts() {
  const Row row(kSizes, 0);
  const std::vector<uint64_t> whole = row.fingerprints(dsx::current_isa());
  std::mt19937 random(0);
  std::uniform_int_distribution<int64_t> place(0, row.begins.back());
  for (int round = 0; round < 20; ++round) {
    std::vector<int64_t> cuts{place(random), place(random), place(random)};
    std::sort(cuts.begin(), cuts.end());
    expect(row.fingerprints(dsx::current_isa(), cuts) == whole,
           "cuts at %ld, %ld, %ld change a fingerprint", long(cuts[0]), long(cuts[1]),
           long(cuts[2]));
  }
}

void test_every_byte() {
  Row row({2 * kRowBytes + 5}, 0);
  std::set<uint64_t> found{row.fingerprints(dsx::current_isa())[0]};
  for (char& byte : row.memory[0]) {
    byte = char(byte ^ 0x80);
    found.insert(row.fingerprints(dsx::current_isa())[0]);
    byte = char(byte ^ 0x80);
  }
  expect(found.size() == row.memory[0].size() + 1, "%zu fingerprints of %zu changes", found.size(),
         row.memory[0].size());
}

}  // namespace

int main() {
  test_everywhere();
  test_cuts();
  test_every_byte();
  return finish();
}
