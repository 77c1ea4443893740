// The pipeline as a warp that multiplies sees it: stages that arrive one after the other, each of
// which it gives back when it has read it.
#pragma once

#include <utility>

#include "attention/decode/decode_pipeline_cuda.cuh"

namespace dsx::cuda {

template <class Kind, int kWidth>
class Stages {
  using Layout = cuda::StageLayout<Kind, kWidth>;

 public:
  // A stage that has arrived, for as long as the warp may read it. Only wait() makes one, it cannot
  // be copied, and release() takes it: so none is given back that has not been waited for, and who
  // is lent one by const reference cannot give it back.
  class Arrived {
   public:
    Arrived(const Arrived&) = delete;
    Arrived& operator=(const Arrived&) = delete;

    __device__ char* tile() const { return tile_; }

   private:
    friend class Stages;
    __device__ explicit Arrived(char* tile) : tile_(tile) {}

    char* const tile_;
  };

  __device__ Stages(Pipeline& pipeline, char* memory, int stages, int warp)
      : pipeline_(pipeline), warp_(warp), state_{stages} {
    memory_ = memory + warp * Layout::kSize;
    scales_ = reinterpret_cast<const float*>(memory + stages * kPageWarps * Layout::kSize) +
              warp * Layout::kScales;
  }

  // The next one. Until that is released, it is the same one.
  [[nodiscard]] __device__ Arrived wait() const {
    wait_for_next();
    return Arrived(memory_ + state_.stage * (kPageWarps * Layout::kSize));
  }
  // Scales of a page's tokens, which come with its first stage: the next one, to be taken later.
  __device__ const float* wait_for_scales() const {
    wait_for_next();
    return scales_ + state_.stage * (kPageWarps * Layout::kScales);
  }
  // The warp that reads fills it anew once all others have given it back, too.
  __device__ void release(Arrived&&) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&pipeline_.empty[state_.stage]);
    state_.advance();
  }

 private:
  __device__ void wait_for_next() const {
    wait_for(&pipeline_.full[state_.stage][warp_], state_.phase);
  }

  Pipeline& pipeline_;
  const int warp_;
  char* memory_;
  const float* scales_;
  PipelineState state_;
};

}  // namespace dsx::cuda
