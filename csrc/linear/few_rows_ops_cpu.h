// Divides a skinny GEMM among torch's threads.
#pragma once

#include <algorithm>

#include "linear/few_rows.h"
#include "common/torch/cpu.h"

namespace dsx {

constexpr int64_t kProductsOfThread = 65536;  // some 5 to 10 us: less is not worth a thread

// Calls body(isa, begin, end) for ranges of columns, which hold kSquared neighbours together.
template <class Body>
void divide_columns(const FewRows& call, const Body& body) {
  const int64_t groups = (call.columns + kSquared - 1) / kSquared;
  in_parallel(groups, call.length * call.rows * kSquared, kProductsOfThread,
              [&](Isa isa, int64_t begin, int64_t end) {
    body(isa, begin * kSquared, std::min(end * kSquared, call.columns));
  });
}

}  // namespace dsx
