// softmax on CUDA of scores that are only scaled, and the choice.
#include "softmax/softmax_cuda.cuh"
#include "softmax/softmax_ring_cuda.cuh"

namespace dsx {
namespace {

bool is_plain(const Scores& scores) {
  return scores.soft_cap == 0 && scores.mask.kind == SoftmaxMask::Kind::none &&
         scores.slopes == nullptr;
}

}  // namespace

void softmax_cuda(const Softmax& softmax, void* stream) {
  if (softmax.rows == 0 || softmax.length == 0) return;
  cuda::check(cudaPeekAtLastError(), "softmax");  // of somebody before
  const bool whole = cuda::are_whole({softmax.x, softmax.out}, softmax.length, softmax.x.dtype);
  const bool plain = is_plain(softmax.scores);
  if (plain && run_in_parts(softmax, whole, cudaStream_t(stream))) return;
  if (!whole || !plain) return masked_softmax_cuda(softmax, whole, stream);
  launch_softmax<true>(softmax, whole, stream);
}

}  // namespace dsx
