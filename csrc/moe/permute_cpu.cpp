// moe_permute and moe_unpermute on the CPU: picks the storage type and the instruction set.
#include "moe/permute.h"

#include <cstring>

#include "common/simd/past_cache.h"

namespace dsx {
namespace {

void* bytes_of_row(const Rows& rows, int64_t i) {
  return static_cast<char*>(rows.data) + rows.place_of(i) * bytes_of(rows.dtype);
}

}  // namespace
}  // namespace dsx

#define DSX_KERNEL_SOURCE "moe/permute_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void permute_cpu(Isa isa, const Permute& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, permute_tokens(call, begin, end));
}

void unpermute_cpu(Isa isa, const Unpermute& call, int64_t begin, int64_t end) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, unpermute_tokens<T>(call, begin, end));
  }, call.y, call.out);
}

void unpermute_backward_cpu(Isa isa, const UnpermuteBackward& call, int64_t begin, int64_t end) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, unpermute_backward_tokens<T>(call, begin, end));
  }, call.y, call.grad_out, call.grad_y);
}

void clear_rows_cpu(const Slots& slots, const Rows& rows, int64_t length) {
  const size_t bytes = size_t(length * bytes_of(rows.dtype));
  for (int64_t i = *slots.end; i < slots.rows; ++i) memset(bytes_of_row(rows, i), 0, bytes);
}

}  // namespace dsx
