// prefill_attention by groups of warps on CUDA, for queries of float16.
#define DSX_QUERY Half
#include "attention/prefill/prefill_warpgroups_launch_cuda.inl"
