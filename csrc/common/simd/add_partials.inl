// The sum of what groups of rows have added up, column by column, in the order of the groups and in
// double, as there may be many of them.
inline void add_partials(const float* partials,  // [groups, length]
                         int64_t groups, int64_t length, int64_t begin, int64_t end,
                         double* totals,         // [length], added to; null: begins at 0
                         Pointer<Any> target) {  // elements [begin, end) written; null: not yet
  for_each_vector(begin, end, [&](int64_t i, int count) {
    double sums[Vec::size] = {};
    if (totals != nullptr) memcpy(sums, totals + i, size_t(count) * sizeof(double));
    for (int64_t group = 0; group < groups; ++group) {
      add_to_doubles(Vec::load(partials + group * length + i, count), sums);
    }
    if (totals != nullptr) memcpy(totals + i, sums, size_t(count) * sizeof(double));
    if (target) rounded(sums).store(target + i, count);
  });
}
