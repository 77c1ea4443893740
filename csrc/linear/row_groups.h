// Rows that have weights of their own: those of expert 0 lie before those of expert 1, and so on.
// No torch: plain pointers and numbers.
#pragma once

#include <cstdint>

namespace dsx {

constexpr int64_t kMostGroupedRows = 512;

struct RowGroups {
  int64_t experts;
  const int32_t* offsets;  // [experts]: where the rows of each end; behind the last they are nobody's
};

}  // namespace dsx
