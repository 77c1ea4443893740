// The sum of what groups of rows have added up, column by column, in the order of the groups.
inline void add_partials(const float* partials,  // [groups, length]
                         int64_t groups, int64_t length, int64_t begin, int64_t end,
                         Pointer<Any> target) {  // elements [begin, end) written
  for_each_vector(begin, end, [&](int64_t i, int count) {
    Vec sum(0.0f);
    for (int64_t group = 0; group < groups; ++group) {
      sum = sum + Vec::load(partials + group * length + i, count);
    }
    sum.store(target + i, count);
  });
}
