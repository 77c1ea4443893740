// Asks for memory that a loop over several arrays will come to. Some processors follow few streams
// by themselves: on a Xeon, a step that reads four and writes three takes 13 % less time. On a Zen
// 4 it takes up to 16 % more: gains_from_prefetch() of isa.h says where to ask.
#pragma once

#include <cstdint>

namespace dsx {

constexpr int64_t kPrefetchBytes = 2048;  // ahead; half of it gains nothing on an EPYC
constexpr int64_t kPrefetchElements = kPrefetchBytes / 2;  // ahead at the most: of 16 bits

inline void prefetch(const void* position) {
  __builtin_prefetch(static_cast<const char*>(position) + kPrefetchBytes);
}

}  // namespace dsx
