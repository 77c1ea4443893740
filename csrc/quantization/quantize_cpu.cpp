// quantize and dequantize on the CPU: picks the instruction set.
#include "quantization/quantize.h"

#include "common/simd/past_cache.h"
#include "common/simd/prefetch.h"

#define DSX_KERNEL_SOURCE "quantization/quantize_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

QuantizeTasks::QuantizeTasks(const Groups& call, bool measured) {
  const int64_t of_group = measured ? 1 : call.group;
  const int64_t least = ceil_div(kMostGroups, of_group) * of_group;
  length = least % 2 == 0 ? least : 2 * least;
}

Parts::Parts(const Groups& call) {
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const int64_t group = least(call.group, call.length);
  const int64_t group_rows = least(call.group_rows, call.rows);
  columns = least(group, kPart);
  rows = least(group_rows, ceil_div(kPart, columns));
  across = ceil_div(group, columns);
  of_group = across * ceil_div(group_rows, rows);
}

void measure_parts_cpu(Isa isa, const Quantize& call, int64_t begin, int64_t end, Largest* found) {
  DSX_DISPATCH_ISA(isa, measure_parts(call, begin, end, found));
}

void finish_scales_cpu(Isa isa, const Quantize& call, const Largest* found) {
  DSX_DISPATCH_ISA(isa, finish_scales(call, found));
}

void quantize_cpu(Isa isa, const Quantize& call, bool measured, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, quantize_tasks(call, measured, begin, end));
}

void dequantize_cpu(Isa isa, const Dequantize& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, dequantize_tasks(call, begin, end));
}

}  // namespace dsx
