// prefill_attention by tensor cores on CUDA, for queries of bfloat16.
#define DSX_QUERY BFloat16
#include "transformer/prefill_mma_launch_cuda.inl"
