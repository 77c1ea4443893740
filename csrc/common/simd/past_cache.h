// Results that go past the cache: an ordinary store reads the line that it writes to first, a third
// more of all that a copy moves, and puts it where something else was.
#pragma once

#include "common/rows.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace dsx {

// Of a result as large as this and of what it was made of, no core's share of a cache holds enough
// for whoever reads the result next, who begins at its other end. Measured with 4,096 rows of 4,096
// on a Zen 4: an op that does little else takes two thirds of the time.
constexpr int64_t kLeastPastCache = 16 << 20;  // bytes

// What goes there begins with a line of the cache.
inline bool begins_line(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 64 == 0;
}

// Whether rows are large enough to go past the cache, and each begins a line. Results that lie in
// groups do not.
inline bool go_past_cache(const Rows& results, int64_t rows, int64_t length) {
  const int64_t element = bytes_of(results.dtype);
  return rows * length * element >= kLeastPastCache && results.group == 0 &&
         begins_line(results.data) && results.pitch * element % 64 == 0;
}

// Whoever sees what this thread stores from now on also sees what it has sent past the cache.
inline void end_past_cache() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace dsx
