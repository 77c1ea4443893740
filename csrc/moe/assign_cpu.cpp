// moe_assign on the CPU: all of it on one thread, as it takes a hundredth of what experts do.
#include <algorithm>
#include <vector>

#include "moe/assign.h"

namespace dsx {

void assign_cpu(const Assign& call) {
  const int64_t tokens = call.tokens, k = call.k, experts = call.num_experts;
  const auto is_expert = [&](int64_t e) { return e >= 0 && e < experts; };
  std::fill_n(call.counts, experts, 0);
  std::fill_n(call.first_counts, experts, 0);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t j = 0; j < k; ++j) {
      const int64_t e = call.experts[token * k + j];
      if (!is_expert(e)) continue;
      ++call.counts[e];
      call.first_counts[e] += j == 0;
    }
  }
  std::vector<int64_t> next(size_t(experts), 0);  // row of each expert
  int64_t rows = 0;
  for (int64_t e = 0; e < experts; ++e) {
    next[size_t(e)] = rows;
    rows += std::min(call.counts[e], call.capacity);
    call.offsets[e] = int32_t(rows);
  }
  std::vector<int64_t> order(size_t(call.seed == nullptr ? 0 : tokens));
  for (size_t place = 0; place < order.size(); ++place) {
    order[place] = TokenOrder(tokens, *call.seed).token_at(int64_t(place));
  }
  for (int64_t j = 0; j < k; ++j) {
    for (int64_t place = 0; place < tokens; ++place) {
      const int64_t i = (order.empty() ? place : order[size_t(place)]) * k + j;
      const int64_t e = call.experts[i];
      const bool fits = is_expert(e) && next[size_t(e)] < call.offsets[e];
      call.slots[i] = fits ? next[size_t(e)]++ : -1;
    }
  }
}

}  // namespace dsx
