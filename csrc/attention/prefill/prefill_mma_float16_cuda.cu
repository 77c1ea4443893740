// prefill_attention by tensor cores on CUDA, for queries of float16.
#define DSX_QUERY Half
#include "attention/prefill/prefill_mma_launch_cuda.inl"
