// block_sparse_attention by tensor cores on CUDA, for bfloat16.
#define DSX_ELEMENT BFloat16
#include "attention/sparse/block_sparse_mma_launch_cuda.inl"
