// softmax on CUDA of all other scores. A file of its own, so that both compile side by side.
#include "softmax/softmax_cuda.cuh"

namespace dsx {

void masked_softmax_cuda(const Softmax& softmax, bool whole, void* stream) {
  launch_softmax<false>(softmax, whole, stream);
}

}  // namespace dsx
