// Tests the kernels of a cache of floats.
#include "attention/cache/paged_kv.h"

using Kind = dsx::FloatKv;

#include "kv_cache.inl"
