// What a CPU op gets from torch: its threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "common/simd/isa.h"

namespace dsx {

// How many things of so many elements each are worth a thread, for which `least` elements are.
inline int64_t grain_of(int64_t elements, int64_t least) {
  return std::max<int64_t>(1, least / std::max<int64_t>(1, elements));
}

// Calls function(isa, begin, end) for ranges of `count` things of so many elements each, on torch's
// threads.
template <class Function>
void in_parallel(int64_t count, int64_t elements, int64_t least, const Function& function) {
  const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
  torch::stable::parallel_for(0, count, grain_of(elements, least),
                              [&](int64_t begin, int64_t end) { function(isa, begin, end); });
}

}  // namespace dsx
