// Torch's threads for the activations on the CPU.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "common/simd/isa.h"

namespace dsx {

constexpr int64_t kElementsPerThread = 32768;  // some 10 us: less is not worth a thread

// Calls function(isa, call, begin, end) for all elements of all rows.
template <class Call>
void for_all_elements(const Call& call, void (*function)(Isa, const Call&, int64_t, int64_t)) {
  const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
  torch::stable::parallel_for(0, call.rows * call.length, kElementsPerThread,
                              [&](int64_t begin, int64_t end) { function(isa, call, begin, end); });
}

}  // namespace dsx
