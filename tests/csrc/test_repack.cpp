// Tests repack_cpu.cpp in every ISA that this CPU has: each code is where packed_weight.h draws it,
// however the work is cut, and nothing beside words and codes is touched.
#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "expect.h"
#include "quantization/repack.h"

namespace {

using dsx::Isa;
using dsx::QuantFormat;
using dsx::Repack;

struct Case {
  QuantFormat format;
  bool across, in_order, lanes_beside;
  int64_t rows, length;
};

template <class T>
std::unique_ptr<T[]> exactly(int64_t count) {  // of which a sanitizer knows the end
  return std::unique_ptr<T[]>(new T[size_t(count)]);
}

uint32_t code_of(const Repack& call, int64_t row, int64_t element) {
  if (element >= call.length) return dsx::packed_padding(call.format);
  if (call.order != nullptr) element = call.order[element];
  const int places[] = {0, 4, 1, 5, 2, 6, 3, 7};
  const int64_t in_word = 32 / call.bits();
  const int64_t lane = call.across ? row / 8 : row;
  const int64_t step = call.across ? element : element / in_word;
  const int64_t place = call.across ? places[row % 8] : element % in_word;
  const uint32_t word = call.words[lane * call.lane_pitch + step * call.step_pitch];
  const uint32_t code = (word >> (place * call.bits())) & (call.bits() == 4 ? 15 : 255);
  return call.format == QuantFormat::int8 ? code ^ 128 : code;
}

uint8_t byte_of(const Repack& call, int64_t row, int64_t byte) {
  const int64_t two = 2 * (byte % 16 / 4), number = byte % 4;
  if (call.bits() == 8) {
    const int64_t drawn[] = {two, 8 + two, two + 1, 9 + two};
    return uint8_t(code_of(call, row, byte / 16 * 16 + drawn[number]));
  }
  const int64_t drawn[] = {two, 8 + two, 16 + two, 24 + two, two + 1, 9 + two, 17 + two, 25 + two};
  const int64_t first = byte / 16 * 32;
  return uint8_t(code_of(call, row, first + drawn[2 * number]) |
                 code_of(call, row, first + drawn[2 * number + 1]) << 4);
}

void test_repack(const Case& c) {
  std::mt19937 random(0);
  Repack call{};
  call.format = c.format;
  call.biased = true;
  call.across = c.across;
  call.rows = c.rows;
  call.length = c.length;
  call.row_bytes = dsx::ceil_div(c.length * call.bits(), 1024) * 128;
  const int64_t count = call.lanes() * call.steps(), bytes = call.rows * call.row_bytes;
  const auto words = exactly<uint32_t>(count);
  for (int64_t i = 0; i < count; ++i) words[size_t(i)] = uint32_t(random());
  call.words = words.get();
  call.lane_pitch = c.lanes_beside ? 1 : call.steps();
  call.step_pitch = c.lanes_beside ? call.lanes() : 1;
  const auto order = exactly<int64_t>(c.length);
  for (int64_t i = 0; i < c.length; ++i) order[size_t(i)] = i;
  std::shuffle(order.get(), order.get() + c.length, random);
  if (!c.in_order) call.order = order.get();
  const int64_t blocks = dsx::ceil_div(call.lanes(), dsx::kRepackLanes);
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) continue;
    for (int64_t step : {int64_t{1}, blocks}) {
      const auto codes = exactly<uint8_t>(bytes);
      const auto scratch = exactly<uint8_t>(dsx::repack_scratch_bytes(call));
      call.codes = codes.get();
      for (int64_t i = 0; i < blocks; i += step) {
        dsx::repack_cpu(isa, call, scratch.get(), i, std::min(i + step, blocks));
      }
      int64_t wrong = 0;
      for (int64_t i = 0; i < bytes; ++i) {
        wrong += codes[size_t(i)] != byte_of(call, i / call.row_bytes, i % call.row_bytes);
      }
      expect(wrong == 0, "%s: %ld wrong bytes of format %d, %ld x %ld", dsx::name_of(isa),
             long(wrong), int(c.format), long(c.rows), long(c.length));
    }
  }
}

}  // namespace

int main() {
  for (QuantFormat format : {QuantFormat::int8, QuantFormat::int4, QuantFormat::nf4}) {
    for (int kind = 0; kind < 8; ++kind) {
      const bool across = kind % 2;
      if (across && format == QuantFormat::int8) continue;
      for (int64_t rows : {8, 40, 17, 136, 264}) {
        if (across && rows % 8) continue;
        for (int64_t length : {1, 33, 256, 1025}) {
          test_repack({format, across, kind / 2 % 2 == 0, kind / 4 == 0, rows, length});
        }
      }
    }
  }
  return finish();
}
