// Tests the kernels of a cache of floats.
#include "transformer/paged_kv.h"

using Kind = dsx::FloatKv;

#include "kv_cache.inl"
