// moe_permute and moe_unpermute on the CPU: copies, and the choice of storage type and instruction
// set.
#include "moe/permute.h"

#include <cstring>

#define DSX_KERNEL_SOURCE "moe/permute_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

namespace {

char* bytes_of_row(const Rows& rows, int64_t i) {
  return static_cast<char*>(rows.data) + rows.place_of(i) * bytes_of(rows.dtype);
}

}  // namespace

void permute_cpu(Isa /*isa*/, const Permute& call, int64_t begin, int64_t end) {
  const size_t bytes = size_t(call.length * bytes_of(call.x.dtype));
  const int64_t k = call.slots.k;
  for (int64_t token = begin; token < end; ++token) {
    const char* source = bytes_of_row(call.x, token);
    for (int64_t j = token * k; j < (token + 1) * k; ++j) {
      const int64_t place = call.slots.places[j];
      if (call.slots.is_row(place)) memcpy(bytes_of_row(call.out, place), source, bytes);
    }
  }
}

void unpermute_cpu(Isa isa, const Unpermute& call, int64_t begin, int64_t end) {
  with_storage_type_of(
      [&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, unpermute_tokens<T>(call, begin, end));
      },
      call.y, call.out);
}

void unpermute_backward_cpu(Isa isa, const UnpermuteBackward& call, int64_t begin, int64_t end) {
  with_storage_type_of(
      [&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, unpermute_backward_tokens<T>(call, begin, end));
      },
      call.y, call.grad_out, call.grad_y);
}

void clear_rows_cpu(const Slots& slots, const Rows& rows, int64_t length) {
  const size_t bytes = size_t(length * bytes_of(rows.dtype));
  for (int64_t i = *slots.end; i < slots.rows; ++i) memset(bytes_of_row(rows, i), 0, bytes);
}

}  // namespace dsx
