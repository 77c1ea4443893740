// Ids of tokens, as the ops of this room take them.
#pragma once

#include "common/torch/device.h"
#include "common/torch/slots.h"

namespace dsx {

inline int64_t checked_tokens(const char* op, const Item& item, int64_t tokens) {
  check(tokens >= 0 && tokens <= INT32_MAX, op, ": ", item, " is ", tokens, ", expected 0 to ",
        INT32_MAX);
  return tokens;
}

// Each of these is the number of a token. On CUDA nobody waits to look at them.
inline void check_ids([[maybe_unused]] const char* op, [[maybe_unused]] const int32_t* ids,
                      [[maybe_unused]] int64_t count, [[maybe_unused]] int64_t tokens) {
#ifndef USE_CUDA
  for (int64_t i = 0; i < count; ++i) {
    check(ids[i] >= 0 && ids[i] < tokens, op, ": ids has ", ids[i], " as its element number ", i,
          ", expected 0 to ", tokens - 1, ", the tokens");
  }
#endif
}

}  // namespace dsx
