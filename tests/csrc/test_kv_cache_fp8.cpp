// Tests the kernels of a cache of float8.
#include "attention/cache/paged_kv.h"

using Kind = dsx::Fp8Kv;

#include "kv_cache.inl"
