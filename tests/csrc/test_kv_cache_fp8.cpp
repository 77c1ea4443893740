// Tests the kernels of a cache of float8.
#include "transformer/paged_kv.h"

using Kind = dsx::Fp8Kv;

#include "kv_cache.inl"
