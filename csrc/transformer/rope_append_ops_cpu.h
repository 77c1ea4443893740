// rope_append_ with torch's threads on the CPU.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "transformer/rope_append_ops.h"

namespace dsx {

struct AppendOnCpu {
  static constexpr int64_t kElementsPerThread = 32768;  // some 10 us: less is not worth a thread

  static void run(const RopeAppend& call, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    const int64_t elements = (call.q.heads + 2 * call.kv.heads) * call.kv.width;  // of a token
    torch::stable::parallel_for(
        0, call.news.batches * call.news.tokens,
        std::max<int64_t>(1, kElementsPerThread / elements),
        [&](int64_t begin, int64_t end) { rope_append_cpu(isa, call, begin, end); });
  }
};

}  // namespace dsx
