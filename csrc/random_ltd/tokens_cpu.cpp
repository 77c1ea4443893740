// Rows of tokens on the CPU: picks the instruction set.
#include "random_ltd/tokens.h"

#include <cstring>

#include "common/simd/past_cache.h"

namespace dsx {
namespace {

// Whether so many rows are large enough to go past the cache, and each begins and ends a line.
bool go_past_cache(const TokenRows& rows, int64_t count, int64_t bytes) {
  return count * bytes >= kLeastPastCache && begins_line(rows.data) &&
         (rows.of_sample | rows.of_token | bytes) % 64 == 0;
}

#include "random_ltd/tokens_math.inl"

void add_rows(const MergeTokens& call, int64_t sample, int32_t first, char* out) {
  const int32_t* const next = call.next + sample * call.tokens.kept;
  const auto next_of = [&](int32_t id) { return next[id]; };
  for (int64_t i = 0; i < call.bytes / bytes_of(call.number); ++i) {
    add_numbers(call, sample, first, i, next_of, out);
  }
}

}  // namespace
}  // namespace dsx

#define DSX_KERNEL_SOURCE "random_ltd/tokens_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void move_tokens_cpu(Isa isa, const MoveTokens& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, move_tokens(call, begin, end));
}

void merge_tokens_cpu(Isa isa, const MergeTokens& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, merge_tokens(call, begin, end));
}

}  // namespace dsx
