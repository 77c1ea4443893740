// moe_route on the CPU: picks the instruction set.
#include "moe/route.h"

#define DSX_KERNEL_SOURCE "moe/route_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void route_cpu(Isa isa, const Route& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, route_tiles(call, begin, end));
}

void route_backward_cpu(Isa isa, const RouteBackward& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, route_backward_tokens(call, begin, end));
}

void add_tiles_cpu(const Route& call) {
  const int64_t n = call.options.experts;
  const int64_t tiles = ceil_div(call.options.tokens, tokens_of_tile(call.options.tokens));
  for (int64_t i = 0; i <= n; ++i) {
    double sum = 0;
    for (int64_t tile = 0; tile < tiles; ++tile) sum += double(call.partials[tile * (n + 1) + i]);
    *(i < n ? call.probability_sums + i : call.z_sum) = float(sum);
  }
}

}  // namespace dsx
