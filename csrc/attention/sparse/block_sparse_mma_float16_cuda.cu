// block_sparse_attention by tensor cores on CUDA, for float16.
#define DSX_ELEMENT Half
#include "attention/sparse/block_sparse_mma_launch_cuda.inl"
