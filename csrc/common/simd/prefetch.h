// Asks for memory that a loop over several arrays will come to. Some processors follow few streams
// by themselves: on a Xeon, a step that reads four and writes three takes 13 % less time.
#pragma once

#include <cstdint>

#include "common/pointer.h"

namespace dsx {

constexpr int64_t kPrefetchBytes = 2048;  // ahead; half of it gains nothing on an EPYC
constexpr int64_t kPrefetchElements = kPrefetchBytes / 2;  // ahead at the most: of 16 bits

template <class T>
inline void prefetch(Pointer<T> position) {
  __builtin_prefetch(reinterpret_cast<const char*>(position.address) + kPrefetchBytes);
}

}  // namespace dsx
