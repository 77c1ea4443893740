// Tests the kernels of a cache of int8.
#include "attention/cache/paged_kv.h"

using Kind = dsx::Int8Kv;

#include "kv_cache.inl"
