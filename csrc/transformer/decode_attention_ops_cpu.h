// decode_attention with torch's threads on the CPU.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "transformer/decode_attention_ops.h"

namespace dsx {

struct DecodeOnCpu {
  static constexpr int64_t kRowsPerThread = 4;  // of results

  static void run(const DecodeAttention& call, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    std::vector<int64_t> first(size_t(call.news.batches) + 1, 0);
    for (int64_t batch = 0; batch < call.news.batches; ++batch) {
      const Chunks chunks = chunks_of(sequence_of(call.kv, call.news, batch), call.window);
      first[size_t(batch) + 1] = first[size_t(batch)] + (chunks.end - chunks.first) * call.kv.heads;
    }
    const int64_t floats = first.back() * call.rows() * partial_floats(call.kv.width);
    const std::unique_ptr<float[]> partials(new float[size_t(floats)]);  // not filled
    const DecodeUnits units{first.data(), partials.get()};
    torch::stable::parallel_for(0, first.back(), 1, [&](int64_t begin, int64_t end) {
      decode_chunks_cpu(isa, call, units, begin, end);
    });
    torch::stable::parallel_for(
        0, call.news.batches * call.news.tokens * call.q.heads, kRowsPerThread,
        [&](int64_t begin, int64_t end) { merge_chunks_cpu(isa, call, units, begin, end); });
  }
};

}  // namespace dsx
