// Asks for memory that a loop over several arrays will come to: some processors follow few streams
// by themselves. Measured with Adam, which reads four arrays of floats and writes three: on a Zen 3
// it takes 11 % longer without, and 3 to 8 % longer with twice the distance; on a Xeon, it takes 13
// % less time with twice the distance than without.
#pragma once

#include <cstdint>

namespace dsx {

constexpr int64_t kPrefetchBytes = 1024;                   // ahead
constexpr int64_t kPrefetchElements = kPrefetchBytes / 2;  // ahead at the most: of 16 bits

inline void prefetch(const void* position, int64_t bytes_ahead = kPrefetchBytes) {
  // GCC takes a function that does nothing else for one without effect, and leaves out its calls.
  asm volatile("");
  __builtin_prefetch(static_cast<const char*>(position) + bytes_ahead);
}

// The same into the second cache, for what is far ahead: then the first one does not overflow, and
// loads find what they need there. Measured on one thread of a Zen 4, with rows of 0.5 to 7 kB, of
// which 16 are read side by side and the next 16 asked for: 1.1 to 1.7 times the bytes a second of
// asking for nothing, 1.3 to 1.6 times those of asking for them in the first cache.
inline void prefetch_early(const void* position, int64_t bytes_ahead) {
  asm volatile("");
  __builtin_prefetch(static_cast<const char*>(position) + bytes_ahead, 0, 2);
}

}  // namespace dsx
