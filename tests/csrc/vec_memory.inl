// What test_vec_memory.cpp calls in each ISA; From and To are a T*, a Pointer<T> or a Pointer<Any>.

inline int lanes_of_vec() { return Vec::size; }

// target = source, converted.
template <class From, class To>
void convert(From source, To target, int64_t n) {
  for_each_vector(
      0, n, [&](int64_t i, int count) { Vec::load(source + i, count).store(target + i, count); });
}

// All lanes of one vector of which `count` are loaded.
template <class From>
void load_lanes(From source, int count, float* lanes) {
  Vec::load(source, count).store(lanes, Vec::size);
}
