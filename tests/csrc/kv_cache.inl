// Tests rope_append_cpu.cpp, decode_cpu.cpp and prefill_cpu.cpp, compiled for
// the kind of storage `Kind`, in every ISA that this CPU has: tokens are appended to slots whose
// pages end where memory ends, then attended to, against double, and bit for bit against the scalar
// ISA, however the work is cut.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "dtypes.h"
#include "expect.h"
#include "attention/decode/decode.h"
#include "attention/prefill/prefill.h"
#include "attention/cache/rope_append.h"

namespace {

using dsx::Dtype;
using dsx::Isa;

constexpr int64_t kHeads = 2, kGroup = 3, kTokens = 23, kPages = 13, kPagesOfSlot = 5;
// Slots of the batch: two that fit, one with a page that is not there, one longer than its table,
// one of no slot, one that is not there.
constexpr int32_t kSlots[] = {1, 0, 2, 3, -1, 7};
constexpr int32_t kCounts[] = {23, 3, 23, 23, 23, 23};
constexpr int32_t kLengths[] = {63, 265, 70, 64 * kPagesOfSlot + 1};
constexpr int64_t kBatches = 6, kRight = 2;  // the first ones are right

float number_at(int64_t i, float seed) { return std::sin(seed + float(i) * 0.73f); }

[[maybe_unused]] float value_of_code(uint8_t code) {
  if (std::is_same_v<Kind, dsx::Int8Kv>) return float(int8_t(code));
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const float magnitude = exponent == 0 ? std::ldexp(float(fraction), -9)
                                        : std::ldexp(float(fraction + 8), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// That of an integer from -7 to 7.
[[maybe_unused]] uint8_t code_of(int integer) {
  if (std::is_same_v<Kind, dsx::Int8Kv>) return uint8_t(integer);
  constexpr uint8_t kCodes[] = {0, 0x38, 0x40, 0x44, 0x48, 0x4a, 0x4c, 0x4e};
  return uint8_t(kCodes[std::abs(integer)] | (integer < 0 ? 0x80 : 0));
}

// Elements of keys or values, with their scales.
struct Stored {
  Dtype dtype;
  int64_t width;
  std::vector<char> bytes;
  std::vector<float> scales;

  Stored(Dtype of, int64_t of_width)
      : dtype(of),
        width(of_width),
        bytes(size_t(kPages * kHeads * dsx::kPageTokens * width *
                     (Kind::kQuantized ? 1 : bytes_of(of)))),
        scales(size_t(Kind::kQuantized ? kPages * kHeads * dsx::kPageTokens : 0)) {}

  double at(int64_t page, int64_t head, int64_t token, int64_t i) const {
    const int64_t row = (page * kHeads + head) * dsx::kPageTokens + token;
    if constexpr (Kind::kQuantized) {
      return double(value_of_code(uint8_t(bytes[size_t(row * width + i)]))) *
             double(scales[size_t(row)]);
    } else {
      return double(read(dtype, bytes.data(), row * width + i));
    }
  }
  void set(int64_t page, int64_t head, int64_t token, int64_t i, float value) {
    const int64_t row = (page * kHeads + head) * dsx::kPageTokens + token;
    if constexpr (Kind::kQuantized) {
      bytes[size_t(row * width + i)] = char(code_of(int(std::lround(value * 7))));
      scales[size_t(row)] = 0.125f;
    } else {
      write(dtype, bytes.data(), row * width + i, value);
    }
  }
};

struct Case {
  int64_t width, pairs, window;
  Elements q, k, v, weight, out;
  Stored keys, values;
  std::vector<int32_t> table;
  std::vector<double> frequencies;
  std::vector<float> slopes, sinks, lse;
  int32_t violations = 0;

  Case(Dtype dtype, int64_t of_width, int64_t of_window)
      : width(of_width),
        pairs(of_width / 2),
        window(of_window),
        q(dtype, kBatches * kTokens * kHeads * kGroup * width),
        k(dtype, kBatches * kTokens * kHeads * width),
        v(dtype, kBatches * kTokens * kHeads * width),
        weight(dtype, width),
        out(dtype, kBatches * kTokens * kHeads * kGroup * width),
        keys(dtype, width),
        values(dtype, width),
        table(size_t(4 * kPagesOfSlot), -1),
        frequencies(size_t(pairs)),
        lse(size_t(kBatches * kTokens * kHeads * kGroup)) {
    const int64_t heads = kBatches * kTokens * kHeads;
    for (int64_t i = 0; i < heads * kGroup * width; ++i) q.set(i, number_at(i, 1));
    for (int64_t i = 0; i < heads * width; ++i) k.set(i, number_at(i, 2));
    for (int64_t i = 0; i < heads * width; ++i) v.set(i, number_at(i, 3));
    for (int64_t i = 0; i < width; ++i) weight.set(i, 1 + 0.25f * number_at(i, 4));
    for (int64_t j = 0; j < pairs; ++j) {
      frequencies[size_t(j)] = std::pow(1e-4, double(j) / double(pairs));
    }
    for (int64_t i = 0; i < kHeads * kGroup; ++i) {
      slopes.push_back(0.01f * float(i));
      sinks.push_back(number_at(i, 5));
    }
    // The last page of all is the one that slot 1 ends in.
    for (int64_t i = 0; i < kPagesOfSlot; ++i) {
      table[size_t(1 * kPagesOfSlot + i)] = int32_t(kPages - kPagesOfSlot + i);
      table[size_t(3 * kPagesOfSlot + i)] = 3;
    }
    table[0] = 5;
    table[2 * kPagesOfSlot] = 4;  // and no second page
    for (int64_t row = 0; row < kPages * kHeads * dsx::kPageTokens; ++row) {
      const int64_t page = row / (kHeads * dsx::kPageTokens);
      const int64_t head = row / dsx::kPageTokens % kHeads, token = row % dsx::kPageTokens;
      for (int64_t i = 0; i < width; ++i) {
        keys.set(page, head, token, i, number_at(row * width + i, 6));
        values.set(page, head, token, i, number_at(row * width + i, 7));
      }
    }
  }

  dsx::PagedKv kv() {
    dsx::PagedKv made = {};
    made.keys = keys.bytes.data(), made.values = values.bytes.data();
    made.dtype = keys.dtype;
    made.pages = kPages, made.heads = kHeads, made.width = width;
    made.of_token = width, made.of_head = dsx::kPageTokens * width;
    made.of_page = kHeads * made.of_head;
    if (Kind::kQuantized)
      made.key_scales = keys.scales.data(), made.value_scales = values.scales.data();
    made.table = table.data(), made.lengths = kLengths;
    made.slots = 4, made.pages_of_slot = kPagesOfSlot;
    return made;
  }

  dsx::Heads heads_of(Elements& elements, int64_t heads) {
    return {elements.address(), heads, kTokens * heads * width,
            heads * width,      width, elements.dtype()};
  }

  void append(Isa isa, int64_t cut) {
    dsx::RopeAppend call = {};
    call.kv = kv();
    call.news = {kSlots, kCounts, kBatches, kTokens};
    call.q = heads_of(q, kHeads * kGroup), call.k = heads_of(k, kHeads);
    call.v = heads_of(v, kHeads), call.q_out = call.q;
    call.q_weight = call.k_weight = {weight.address(), weight.dtype()};
    call.eps = 1e-6f;
    call.frequencies = {frequencies.data(), true};
    call.pairs = pairs;
    call.scale = 1;
    call.violations = &violations;
    rope_append_cpu(isa, call, 0, cut);
    rope_append_cpu(isa, call, cut, kBatches * kTokens);
  }

  dsx::DecodeAttention attention() {
    dsx::DecodeAttention call = {};
    call.kv = kv();
    call.news = {kSlots, kCounts, kBatches, kTokens};
    call.q = heads_of(q, kHeads * kGroup);
    call.group = kGroup;
    call.scale = 1 / std::sqrt(float(width));
    call.window = window;
    if (window > 0) call.soft_cap = 3, call.alibi_slopes = slopes.data(), call.sinks = sinks.data();
    call.out = out.address(), call.lse = lse.data();
    return call;
  }

  void prefill(Isa isa, int64_t parts) {
    const dsx::PrefillAttention call = attention();
    const int64_t strips = strips_of(call) * kBatches * kHeads;
    for (int64_t part = 0; part < parts; ++part) {
      prefill_attention_cpu(isa, call, strips * part / parts, strips * (part + 1) / parts);
    }
  }

  void decode(Isa isa, int64_t parts) {
    const dsx::DecodeAttention call = attention();
    std::vector<int64_t> first{0};
    for (int64_t batch = 0; batch < kBatches; ++batch) {
      const dsx::Chunks chunks = chunks_of(sequence_of(call.kv, call.news, batch), call.window);
      first.push_back(first.back() + (chunks.end - chunks.first) * kHeads);
    }
    std::vector<float> partials(size_t(first.back() * call.rows() * dsx::partial_floats(width)));
    const dsx::DecodeTasks tasks{first.data(), partials.data()};
    for (int64_t part = 0; part < parts; ++part) {
      decode_chunks_cpu(isa, call, tasks, first.back() * part / parts,
                        first.back() * (part + 1) / parts);
    }
    const int64_t rows = kBatches * kTokens * kHeads * kGroup;
    merge_chunks_cpu(isa, call, tasks, 0, rows / parts);
    merge_chunks_cpu(isa, call, tasks, rows / parts, rows);
  }

  // All that was written, as it lies.
  std::vector<char> run(Isa isa, int64_t cut, bool as_chunks) {
    append(isa, cut);
    as_chunks ? prefill(isa, cut) : decode(isa, cut);
    std::vector<char> found(keys.bytes);
    const auto add = [&](const void* data, size_t bytes) {
      found.insert(found.end(), static_cast<const char*>(data),
                   static_cast<const char*>(data) + bytes);
    };
    add(values.bytes.data(), values.bytes.size());
    add(keys.scales.data(), keys.scales.size() * sizeof(float));
    add(values.scales.data(), values.scales.size() * sizeof(float));
    const size_t bytes = size_t(bytes_of(q.dtype()));
    const size_t count = size_t(kBatches * kTokens * kHeads * kGroup * width);
    add(q.address(), count * bytes);
    add(out.address(), count * bytes);
    for (float& each : lse) each = std::isnan(each) ? 12345.0f : each;
    add(lse.data(), lse.size() * sizeof(float));
    return found;
  }

  void check_row(int64_t batch, int64_t token, int64_t head) const {
    const int64_t slot = kSlots[batch], count = kCounts[batch];
    const int64_t row = (batch * kTokens + token) * kHeads * kGroup + head;
    const int64_t position = kLengths[slot] - count + token;
    const int64_t begin = window > 0 && position >= window ? position - window + 1 : 0;
    const auto page_of = [&](int64_t key) {
      return int64_t(table[size_t(slot * kPagesOfSlot + key / dsx::kPageTokens)]);
    };
    double total = window > 0 ? std::exp(double(sinks[size_t(head)])) : 0;
    std::vector<double> want(size_t(width), 0.0);
    for (int64_t key = begin; key <= position; ++key) {
      double score = 0;
      for (int64_t i = 0; i < width; ++i) {
        score += double(q[row * width + i]) *
                 keys.at(page_of(key), head / kGroup, key % dsx::kPageTokens, i);
      }
      score /= std::sqrt(double(width));
      if (window > 0) {
        score = 3 * std::tanh(score / 3) - double(slopes[size_t(head)]) * double(position - key);
      }
      total += std::exp(score);
      for (int64_t i = 0; i < width; ++i) {
        want[size_t(i)] +=
            std::exp(score) * values.at(page_of(key), head / kGroup, key % dsx::kPageTokens, i);
      }
    }
    const double rounding = q.dtype() == Dtype::float32   ? 0x1p-24
                            : q.dtype() == Dtype::float16 ? 0x1p-11
                                                          : 0x1p-8;
    for (int64_t i = 0; i < width; ++i) {
      const double got = double(out[row * width + i]), expected = want[size_t(i)] / total;
      expect(std::fabs(got - expected) <= 2e-5 + 1.1 * rounding * std::fabs(expected),
             "row %ld, element %ld of width %ld is %g, expected %g", long(row), long(i),
             long(width), got, expected);
    }
    expect(std::fabs(double(lse[size_t(row)]) - std::log(total)) <= 2e-5,
           "lse of row %ld is %g, expected %g", long(row), double(lse[size_t(row)]),
           std::log(total));
  }

  // What was appended is where it belongs: values as they were, but for the scale.
  void check_values(int64_t batch, int64_t token) const {
    const int64_t slot = kSlots[batch], position = kLengths[slot] - kCounts[batch] + token;
    const int64_t page = table[size_t(slot * kPagesOfSlot + position / dsx::kPageTokens)];
    for (int64_t i = 0; i < kHeads * width; ++i) {
      const double want = double(v[(batch * kTokens + token) * kHeads * width + i]);
      const double got = values.at(page, i / width, position % dsx::kPageTokens, i % width);
      const double error = std::is_same_v<Kind, dsx::Int8Kv>  ? 0.6 / 127
                           : std::is_same_v<Kind, dsx::Fp8Kv> ? 1.1 / 16 * std::fabs(want) + 1e-5
                                                              : 0;
      expect(std::fabs(got - want) <= error, "value %ld is %g, expected %g", long(i), got, want);
    }
  }

  void check() const {
    expect(violations == 1, "no violation was seen");
    for (int64_t batch = 0; batch < kBatches; ++batch) {
      for (int64_t token = 0; token < kTokens; ++token) {
        if (batch < kRight && token < kCounts[batch]) check_values(batch, token);
        for (int64_t head = 0; head < kHeads * kGroup; ++head) {
          const int64_t row = (batch * kTokens + token) * kHeads * kGroup + head;
          const float first = out[row * width];
          if (batch < kRight && token < kCounts[batch]) {
            check_row(batch, token, head);
          } else if (batch < kRight || kSlots[batch] == -1) {
            expect(first == 0, "row %ld is %g, expected 0", long(row), double(first));
          } else {
            expect(std::isnan(first), "row %ld is %g, expected NaN", long(row), double(first));
          }
        }
      }
    }
  }
};

void test(Dtype dtype, int64_t width, int64_t window, bool as_chunks) {
  Case scalar(dtype, width, window);
  const std::vector<char> want = scalar.run(Isa::scalar, 1, as_chunks);
  scalar.check();
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    Case other(dtype, width, window);
    const std::vector<char> got = other.run(isa, 7, as_chunks);
    expect(got == want, "%s: other bits for width %ld", name_of(isa), long(width));
  }
}

}  // namespace

int main() {
  for (bool as_chunks : {false, true}) {
    for (Dtype dtype : kDtypes) {
      for (int64_t width : {2, 7, 40, 66}) test(dtype, width, width % 4 == 0 ? 70 : 0, as_chunks);
    }
    test(Dtype::bfloat16, 256, 300, as_chunks);
  }
  return finish();
}
