// Loops whose threads share the work as they get along.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

#include "common/math.h"

namespace dsx {

// Calls f(begin, end) for ranges that make up [0, count), on torch's threads. Where there are many,
// each thread takes the next one when it is done with the last: threads that share a processor with
// others, as beside a training loop, then keep nobody waiting. Where there are few, a thread gets
// the same ones in every call, which are in its cache. f must not throw.
template <class F>
void shared_for(int64_t count, int64_t grain, const F& f) {
  constexpr int64_t kRange = 65536, kFew = 8;  // of a thread
  const int64_t threads = int64_t(torch::stable::get_num_threads());
  if (count < threads * kFew * kRange) {
    torch::stable::parallel_for(0, count, grain, f);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t thread = first; thread < last; ++thread) {
      for (int64_t begin; (begin = next.fetch_add(kRange, std::memory_order_relaxed)) < count;) {
        f(begin, std::min(begin + kRange, count));
      }
    }
  });
}

}  // namespace dsx
