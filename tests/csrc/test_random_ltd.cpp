// Tests tokens_cpu.cpp, token_sort_cpu.cpp and mask_gather_cpu.cpp in every ISA that this CPU has:
// rows of any number of bytes that end where memory ends, also large ones that go past the cache.
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "expect.h"
#include "random_ltd/mask_gather.h"
#include "random_ltd/token_sort.h"
#include "random_ltd/tokens.h"

namespace {

using dsx::Isa;
using dsx::TokenRows;

constexpr int64_t kSamples = 2, kTokens = 9, kKept = 4;
constexpr int32_t kIds[] = {8, 0, 3, 5, 1, 2, 7, 4};
constexpr int32_t kRepeated[] = {8, 3, 8, 8, 0, 0, 1, 2};

// Bytes at an odd address.
struct Memory {
  std::vector<char> bytes;
  int64_t row, odd;

  Memory(int64_t rows, int64_t length, int64_t offset, char first)
      : bytes(size_t(rows * length + offset)), row(length), odd(offset) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = char(first + char(i * 7));
  }
  TokenRows rows(int64_t tokens) { return {bytes.data() + odd, tokens * row, row}; }
  const char* at(int64_t i) const { return bytes.data() + odd + i * row; }
};

bool same(const char* got, const char* want, int64_t bytes) {
  return want == nullptr ? std::vector<char>(got, got + bytes) == std::vector<char>(size_t(bytes))
                         : memcmp(got, want, size_t(bytes)) == 0;
}

// Which id names each token, and the next one that does.
void find(const int32_t* ids, std::vector<int32_t>& first, std::vector<int32_t>& next) {
  first.assign(kSamples * kTokens, -1);
  next.assign(kSamples * kKept, -1);
  for (int64_t n = 0; n < kSamples; ++n) {
    for (int64_t i = kKept - 1; i >= 0; --i) {
      int32_t& named = first[size_t(n * kTokens + ids[n * kKept + i])];
      next[size_t(n * kKept + i)] = named;
      named = int32_t(i);
    }
  }
}

void test_rows(Isa isa, int64_t length, int64_t odd) {
  Memory all(kSamples * kTokens, length, odd, 1), part(kSamples * kKept, length, odd, 50);
  Memory out = all;
  const dsx::KeptTokens tokens{kSamples, kTokens, kKept, kIds};
  dsx::MoveTokens move{tokens, length, all.rows(kTokens), part.rows(kKept), true};
  Memory before = all;
  move_tokens_cpu(isa, move, 0, 3);
  move_tokens_cpu(isa, move, 3, kSamples * kKept);
  std::vector<int32_t> first, next;
  find(kIds, first, next);
  for (bool has_all : {true, false}) {
    for (bool has_part : {true, false}) {
      dsx::MergeTokens merge = {};
      merge.tokens = tokens;
      merge.bytes = length;
      if (has_all) merge.all = before.rows(kTokens);
      if (has_part) merge.part = part.rows(kKept);
      merge.out = out.rows(kTokens);
      merge.first = first.data();
      merge.next = next.data();
      merge_tokens_cpu(isa, merge, 0, 5);
      merge_tokens_cpu(isa, merge, 5, kSamples * kTokens);
      for (int64_t i = 0; i < kSamples * kTokens; ++i) {
        const int32_t id = first[size_t(i)];
        const char* named = has_part ? part.at(i / kTokens * kKept + id) : nullptr;
        const char* want = id >= 0 ? named : has_all ? before.at(i) : nullptr;
        expect(same(out.at(i), want, length), "row %ld of %ld bytes", long(i), long(length));
        if (has_all && has_part) expect(same(all.at(i), want, length), "scattered %ld", long(i));
      }
    }
  }
  Memory again(kSamples * kKept, length, odd, 90);
  move.part = again.rows(kKept);
  move.to_all = false;
  move_tokens_cpu(isa, move, 0, kSamples * kKept);
  expect(again.bytes.size() == part.bytes.size() &&
             same(again.at(0), part.at(0), kSamples * kKept * length),
         "gathered rows of %ld bytes", long(length));
}

// Rows of tokens that several ids name are added up, in order, in float32.
void test_sums(Isa isa, dsx::Dtype dtype, int64_t n) {
  const int64_t element = dsx::bytes_of(dtype);
  Elements part(dtype, kSamples * kKept * n), out(dtype, kSamples * kTokens * n);
  for (int64_t i = 0; i < kSamples * kKept * n; ++i) part.set(i, 0.37f * float(i % 29) - 3);
  std::vector<int32_t> first, next;
  find(kRepeated, first, next);
  dsx::MergeTokens merge = {};
  merge.tokens = {kSamples, kTokens, kKept, kRepeated};
  merge.bytes = n * element;
  merge.part = {static_cast<char*>(part.address()), kKept * n * element, n * element};
  merge.out = {static_cast<char*>(out.address()), kTokens * n * element, n * element};
  merge.adds = true;
  constexpr dsx::Number kNumbers[] = {dsx::Number::float32, dsx::Number::bfloat16,
                                      dsx::Number::float16};
  merge.number = kNumbers[int(dtype)];
  merge.first = first.data();
  merge.next = next.data();
  merge_tokens_cpu(isa, merge, 0, kSamples * kTokens);
  Elements want(dtype, 1);
  for (int64_t i = 0; i < kSamples * kTokens * n; ++i) {
    float sum = 0;
    for (int64_t r = 0; r < kKept; ++r) {
      const int64_t id = i / n / kTokens * kKept + r;
      if (kRepeated[id] == i / n % kTokens) sum += part[id * n + i % n];
    }
    want.set(0, sum);
    expect(out[i] == want[0], "sum is %g, expected %g", double(out[i]), double(want[0]));
  }
}

void test_masks() {
  for (int64_t bytes : {1, 2, 4, 8, 16}) {
    for (bool one_query : {false, true}) {
      const int64_t queries = one_query ? 1 : kTokens, of_kept = one_query ? 1 : kKept;
      Memory mask(kSamples * queries * kTokens, bytes, 1, 3);
      Memory out(2 * kSamples * of_kept * kKept, bytes, 1, 0);
      std::vector<int32_t> ids(kIds, kIds + kSamples * kKept);
      ids.insert(ids.end(), kRepeated, kRepeated + kSamples * kKept);
      dsx::MaskGather call = {};
      call.layers = 2;
      call.samples = kSamples;
      call.heads = 1;
      call.queries = of_kept;
      call.tokens = kTokens;
      call.kept = kKept;
      call.bytes = bytes;
      call.ids = ids.data();
      call.mask = mask.at(0);
      call.of_sample = queries * kTokens * bytes;
      call.of_query = one_query ? 0 : kTokens * bytes;
      call.of_token = bytes;
      call.out = out.bytes.data() + 1;
      mask_gather_cpu(call, 0, 1);
      mask_gather_cpu(call, 1, call.rows());
      for (int64_t i = 0; i < call.rows() * kKept; ++i) {
        const int64_t row = i / kKept, both = row / of_kept;
        const int64_t query = one_query ? 0 : ids[size_t(both * kKept + row % of_kept)];
        const int64_t key = ids[size_t(both * kKept + i % kKept)];
        const int64_t place = (both % kSamples * queries + query) * kTokens + key;
        expect(same(out.at(i), mask.at(place), bytes), "mask %ld", long(i));
      }
    }
  }
}

void test_sort() {
  std::vector<int32_t> ids(kRepeated, kRepeated + kSamples * kKept);
  dsx::token_sort_cpu({kSamples, kKept, kTokens, ids.data(), nullptr}, 0, kSamples);
  expect(ids == std::vector<int32_t>{3, 8, 8, 8, 0, 0, 1, 2}, "sorted");
}

}  // namespace

int main() {
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    for (int64_t length : {1, 7, 32, 100}) {
      for (int64_t odd : {0, 1, 4}) test_rows(isa, length, odd);
    }
    test_rows(isa, 2 << 20, 0);  // past the cache, if memory begins a line
    for (dsx::Dtype dtype : kDtypes) test_sums(isa, dtype, 19);
  }
  test_masks();
  test_sort();
  return finish();
}
