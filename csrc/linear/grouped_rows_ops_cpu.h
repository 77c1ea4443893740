// Divides the rows of experts among torch's threads.
#pragma once

#include <algorithm>
#include <cstring>

#include "common/torch/cpu.h"
#include "linear/few_rows_ops_cpu.h"
#include "linear/grouped_rows_ops.h"

namespace dsx {

constexpr int64_t kRowsOfReading = 8;  // so many rows are multiplied while a weight is read

// Writes the zeros of rows behind the last offset, and calls body(isa, part, begin, end) for ranges
// of columns of all parts. Each column has a price, so that threads take equal shares of all.
template <class Body>
void divide_parts(const GroupedRows& call, const PartsOfExperts& given, const Body& body) {
  const int64_t known = int64_t(given.of_x.size());
  const int64_t row_bytes = call.columns * bytes_of(call.out.dtype);
  memset(static_cast<char*>(call.out.data) + known * row_bytes, 0,
         size_t((call.rows - known) * row_bytes));
  const int64_t groups = (call.columns + kSquared - 1) / kSquared;
  const auto price = [](const RowsOfExpert& part) { return kRowsOfReading + part.rows; };
  int64_t total = 0;
  for (const RowsOfExpert& part : given.parts) total += groups * price(part);
  in_parallel(total, call.length * kSquared, kProductsOfThread,
              [&](Isa isa, int64_t begin, int64_t end) {
    int64_t start = 0;
    for (const RowsOfExpert& part : given.parts) {
      // The columns whose price begins within [begin, end).
      const auto group_at = [&](int64_t place) {
        const int64_t group = (place - start + price(part) - 1) / price(part);
        return std::clamp<int64_t>(place < start ? 0 : group, 0, groups);
      };
      const int64_t from = group_at(begin), to = group_at(end);
      if (from < to) {
        body(isa, part, from * kSquared, std::min(to * kSquared, call.columns));
      }
      start += groups * price(part);
    }
  });
}

}  // namespace dsx
