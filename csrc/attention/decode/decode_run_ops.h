// How decode_attention is run on the device that this is compiled for.
#pragma once

#include <memory>
#include <vector>

#include "common/torch/device.h"
#include "attention/decode/decode.h"

namespace dsx {

#ifdef USE_CUDA
inline void run(const DecodeAttention& call, int device) {
  const OnDevice on(device);
  const torch::stable::Tensor workspace = cuda_workspace(decode_workspace_bytes(call), device);
  decode_attention_cuda(call, workspace.data_ptr(), on.stream);
}
#else
inline void run(const DecodeAttention& call, int /*device*/) {
  constexpr int64_t kRowsPerThread = 4;  // of results
  std::vector<int64_t> first(size_t(call.news.batches) + 1, 0);
  for (int64_t batch = 0; batch < call.news.batches; ++batch) {
    const Chunks chunks = chunks_of(sequence_of(call.kv, call.news, batch), call.window);
    first[size_t(batch) + 1] = first[size_t(batch)] + (chunks.end - chunks.first) * call.kv.heads;
  }
  const int64_t floats = first.back() * call.rows() * partial_floats(call.kv.width);
  const std::unique_ptr<float[]> partials(new float[size_t(floats)]);  // not filled
  const DecodeTasks tasks{first.data(), partials.get()};
  in_parallel(first.back(), 1, 1, [&](Isa isa, int64_t begin, int64_t end) {
    decode_chunks_cpu(isa, call, tasks, begin, end);
  });
  in_parallel(
      call.news.batches * call.news.tokens * call.q.heads, 1, kRowsPerThread,
      [&](Isa isa, int64_t begin, int64_t end) { merge_chunks_cpu(isa, call, tasks, begin, end); });
}
#endif

}  // namespace dsx
