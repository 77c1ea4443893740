// Registers that the warp groups of a block give each other.
#pragma once

namespace dsx::cuda {

// How many registers each thread of the group has from here on: a multiple of 8. All groups of a
// block that has as many as its threads can begin with say so.
template <int kRegisters>
__device__ inline void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ inline void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace dsx::cuda
