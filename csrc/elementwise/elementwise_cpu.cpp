// The CPU kernels of one elementwise op: of the rules that DSX_RULE_HEADER declares, of which
// DSX_FORMULA has the formulas; the row in op_builder/registry.py defines both. Picks the
// instruction set.
#include DSX_RULE_HEADER

#include <type_traits>
#include <utility>

#include "common/math.h"
#include "common/simd/past_cache.h"
#include "common/simd/prefetch.h"

#define DSX_KERNEL_SOURCE "elementwise/elementwise_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

template <class Rule>
void elementwise_cpu(Isa isa, const Elementwise<Rule>& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, do_elements(call, begin, end));
}

template <class Rule>
void elementwise_tiles_cpu(Isa isa, const Elementwise<Rule>& call, int64_t begin, int64_t end) {
  if constexpr (kHasSums<Rule>) DSX_DISPATCH_ISA(isa, do_tiles(call, begin, end));
}

template <class Rule>
void add_groups_cpu(Isa isa, const float* partials, int64_t groups, int64_t length, int64_t begin,
                    int64_t end, Rows target) {
  const Pointer<Any> sums = target.row<Any>(0);
  DSX_DISPATCH_ISA(isa, add_partials(partials, groups, length, begin, end, nullptr, sums));
}

#define DSX_INSTANTIATE(Rule)                                                           \
  static_assert(IsRule<Rule>, #Rule ": a rule has kOp, kIn, kOut and is_biased(i)");    \
  template void elementwise_cpu(Isa, const Elementwise<Rule>&, int64_t, int64_t);       \
  template void elementwise_tiles_cpu(Isa, const Elementwise<Rule>&, int64_t, int64_t); \
  template void add_groups_cpu<Rule>(Isa, const float*, int64_t, int64_t, int64_t, int64_t, Rows);
DSX_RULES(DSX_INSTANTIATE)

}  // namespace dsx
