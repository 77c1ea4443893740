// How the ops that quantize are told of a format and of groups.
#pragma once

#include <algorithm>
#include <optional>

#include "common/torch/checks.h"
#include "common/torch/rows.h"
#include "quantization/quantize.h"

namespace dsx {

using OptionalInt = std::optional<int64_t>;

struct QuantizeOptions {
  int64_t format;
  bool symmetric;
  OptionalInt group_size, group_rows;  // none: all of a row, all rows
};

inline bool is_integer(QuantFormat format) {
  return format == QuantFormat::int8 || format == QuantFormat::int4;
}

inline void read_groups(const char* op, const QuantizeOptions& options, const RowShape& shape,
                        Groups& call) {
  check(options.format >= 0 && options.format < kQuantFormats, op, ": format is ", options.format,
        ", expected a number from 0 to ", kQuantFormats - 1);
  call.format = QuantFormat(options.format);
  call.asymmetric = !options.symmetric;
  check(options.symmetric || is_integer(call.format), op,
        ": symmetric is False, expected True, as only int8 and int4 have offsets");
  call.rows = shape.rows;
  call.length = shape.length;
  const int64_t most = std::max<int64_t>(1, shape.length);
  call.group = options.group_size.value_or(most);
  check(call.group >= 1 && call.group <= most, op, ": group_size is ", call.group,
        ", expected 1 to ", most, ", the length of a row");
  const int64_t all_rows = std::max<int64_t>(1, shape.rows);
  call.group_rows = options.group_rows.value_or(all_rows);
  check(call.group_rows >= 1, op, ": group_rows is ", call.group_rows, ", expected at least 1");
  call.group_rows = std::min(call.group_rows, all_rows);  // so that no sum of it overflows
}

}  // namespace dsx
