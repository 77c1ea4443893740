// softmax on CUDA of scores that are only scaled, and the choice.
#include "softmax/softmax_cuda.cuh"
#include "softmax/softmax_ring_cuda.cuh"

#include <cstdlib>

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
  if (!whole || !is_plain(softmax.scores)) return masked_softmax_cuda(softmax, whole, stream);
  const char* found = std::getenv("DSX_ROWS_TRIAL");  // TRIAL
  const std::string way = found == nullptr ? "1p" : found;
  const bool sees_all = softmax.scores.before < 0 && softmax.scores.after < 0;
  if (way != "old" && sees_all && softmax.x.dtype == Dtype::bfloat16 &&
      cuda::parts_of(softmax.length) > 1) {
    const cudaStream_t queue = cudaStream_t(stream);
    if (way == "1n" && run_ring<1, 0>(softmax, queue)) return;
    if (way == "2p" && run_ring<2, 0>(softmax, queue)) return;
    if ((way == "1p" || way == "1q" || way == "1h") && run_ring<1, 1>(softmax, queue)) return;
  }
  launch_softmax<true>(softmax, whole, stream);
}

}  // namespace dsx
