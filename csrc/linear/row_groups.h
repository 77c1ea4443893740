// Rows that have weights of their own: those of expert 0 lie before those of expert 1, and so on.
// No torch: plain pointers and numbers.
#pragma once

#include <cstdint>

namespace dsx {

struct RowGroups {
  int64_t experts;
  const int32_t*
      offsets;  // [experts]: where the rows of each end; those behind the last are nobody's
  const int64_t* slots;  // [tokens, choices]: which row is made of that token; null: x has the rows
  int64_t tokens, choices;
};

}  // namespace dsx
