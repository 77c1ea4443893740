// As floats that are not looked at: the bits stay what they are.
inline void copy_past_cache(const void* source, void* target, int64_t bytes) {
  const int64_t floats = bytes / int64_t(sizeof(float));  // whole lines
  for_each_vector(0, floats, [&](int64_t i, int count) {
    const Vec values = Vec::load(static_cast<const float*>(source) + i, count);
    values.store(static_cast<float*>(target) + i, count, true);
  });
}

// Past the cache only where the target is made of whole lines (past_cache.h).
inline void copy_row(const void* source, void* target, int64_t bytes, bool past_cache) {
  if (past_cache && reinterpret_cast<uintptr_t>(source) % sizeof(float) == 0) {
    copy_past_cache(source, target, bytes);
  } else {
    memcpy(target, source, size_t(bytes));
  }
}
