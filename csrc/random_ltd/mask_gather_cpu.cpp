// mask_gather_bert on the CPU.
#include "random_ltd/mask_gather.h"

#include <cstring>

namespace dsx {
namespace {

template <int64_t kBytes>
void gather_row(const MaskGather& call, int64_t row) {
  const MaskRow from(call, row);
  char* const out = call.out + row * call.kept * kBytes;
  for (int64_t i = 0; i < call.kept; ++i) {
    memcpy(out + i * kBytes, from.mask + from.ids[i] * call.of_token, kBytes);
  }
}

template <int64_t kBytes>
void gather_rows(const MaskGather& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) gather_row<kBytes>(call, row);
}

}  // namespace

void mask_gather_cpu(const MaskGather& call, int64_t begin, int64_t end) {
  if (call.bytes == 1) return gather_rows<1>(call, begin, end);
  if (call.bytes == 2) return gather_rows<2>(call, begin, end);
  if (call.bytes == 4) return gather_rows<4>(call, begin, end);
  if (call.bytes == 8) return gather_rows<8>(call, begin, end);
  gather_rows<16>(call, begin, end);
}

}  // namespace dsx
