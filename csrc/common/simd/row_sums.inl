// Sums over the elements of a row, in float and in an order that depends on its length alone: 32
// running sums, of which element i belongs to number i % 32, whatever the width of Vec. So every
// ISA gives the same bits, and a row the same sum wherever it lies.

// Calls body(i, count, terms), which fills in a Vec for each of kSums sums: the terms of `count`
// elements from number i on, and 0 in lanes beyond them. The sums go to `totals`.
template <int kSums, class Body>
inline void add_row(int64_t n, float (&totals)[kSums], const Body& body) {
  constexpr int kLanes = 32;
  constexpr int kVecs = kLanes / Vec::size;
  Vec sums[kSums][kVecs];
  for (int s = 0; s < kSums; ++s) {
    for (int v = 0; v < kVecs; ++v) sums[s][v] = Vec(0.0f);
  }
  const auto add = [&](int64_t i, int count, int v) {
    Vec terms[kSums];
    body(i, count, terms);
    for (int s = 0; s < kSums; ++s) sums[s][v] = sums[s][v] + terms[s];
  };
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int v = 0; v < kVecs; ++v) add(i + v * Vec::size, Vec::size, v);
  }
  for (int v = 0; v < kVecs; ++v) {
    const int64_t i = whole + v * Vec::size;
    if (i < n) add(i, int(n - i < Vec::size ? n - i : Vec::size), v);
  }
  for (int s = 0; s < kSums; ++s) {
    float lanes[kLanes];
    for (int v = 0; v < kVecs; ++v) sums[s][v].store(lanes + v * Vec::size, Vec::size);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    totals[s] = lanes[0];
  }
}
