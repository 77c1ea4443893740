// Tests the kernels of a cache of int8.
#include "transformer/paged_kv.h"

using Kind = dsx::Int8Kv;

#include "kv_cache.inl"
