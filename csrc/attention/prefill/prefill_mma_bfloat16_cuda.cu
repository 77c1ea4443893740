// prefill_attention by tensor cores on CUDA, for queries of bfloat16.
#define DSX_QUERY BFloat16
#include "attention/prefill/prefill_mma_launch_cuda.inl"
