// Shares a matrix multiplication on few rows among torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "common/few_rows.h"

namespace dsx {

constexpr int64_t kProductsOfThread = 65536;  // some 5 to 10 us: less is not worth a thread

// How many pieces of work, of so many products each, are worth a thread.
inline int64_t grain_of(int64_t products) {
  return std::max<int64_t>(1, kProductsOfThread / std::max<int64_t>(1, products));
}

// Calls body with ranges of columns, which hold kSquared neighbours together.
template <class Body>
void share_columns(const FewRows& call, const Body& body) {
  const int64_t groups = (call.columns + kSquared - 1) / kSquared;
  torch::stable::parallel_for(0, groups, grain_of(call.length * call.rows * kSquared),
                              [&](int64_t begin, int64_t end) {
    body(begin * kSquared, std::min(end * kSquared, call.columns));
  });
}

}  // namespace dsx
