// prefill_attention by groups of warps on CUDA, for queries of bfloat16.
#define DSX_QUERY BFloat16
#include "attention/prefill/prefill_warpgroups_launch_cuda.inl"
