// How optimizers store weights and state: as plain elements, or in a form of their own.
#pragma once

#include <type_traits>

#include "common/pointer.h"

namespace dsx {

struct Split {};  // a float in two tensors of 16 bits: a rounded BFloat16 and what it leaves out
struct Codes {};  // 8 bits for each element and one scale for each block of kCodesBlock elements

constexpr int64_t kCodesBlock = 256;

// Float, BFloat16, Half, Split, Codes.
enum class Format : int8_t { float32, bfloat16, float16, split, codes };

constexpr Format format_of(Dtype dtype) { return Format(dtype); }
static_assert(format_of(Dtype::float32) == Format::float32);
static_assert(format_of(Dtype::bfloat16) == Format::bfloat16);
static_assert(format_of(Dtype::float16) == Format::float16);

DSX_HOST_DEVICE constexpr bool is_plain(Format format) { return format <= Format::float16; }
DSX_HOST_DEVICE constexpr Dtype dtype_of(Format format) { return Dtype(format); }  // of plain ones

// Of split ones, those of either tensor.
DSX_HOST_DEVICE constexpr int64_t bytes_of(Format format) {
  return format == Format::split ? 2 : format == Format::codes ? 1 : bytes_of(dtype_of(format));
}

// Whether storage type T can hold what this format says.
template <class T>
constexpr bool holds(Format format) {
  if constexpr (std::is_same_v<T, Split>) {
    return format == Format::split;
  } else if constexpr (std::is_same_v<T, Codes>) {
    return format == Format::codes;
  } else {
    return is_plain(format) && holds<T>(dtype_of(format));
  }
}

}  // namespace dsx
