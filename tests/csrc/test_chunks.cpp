// Tests optimizers/chunks.h: whatever the tensors and the cuts, every element is visited exactly
// once, and no chunk, counted from the start of its tensor, is ever cut.
#include "optimizers/chunks.h"

#include <algorithm>
#include <random>
#include <vector>

#include "expect.h"

namespace {

struct Row {
  std::vector<int64_t> sizes;
  std::vector<int64_t> begins{0};

  explicit Row(const std::vector<int64_t>& tensor_sizes) : sizes(tensor_sizes) {
    for (int64_t size : sizes) begins.push_back(begins.back() + size);
  }
  int64_t end() const { return begins.back(); }
};

// Visits the ranges between neighbouring cuts. Pieces must continue where the last one stopped:
// that is every element once, in order, without counting them, so a tensor may be of any size.
template <int64_t kChunk>
void test_cuts(const Row& row, const std::vector<int64_t>& cuts) {
  int64_t reached = 0;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    int64_t visited = 0;
    const auto visit = [&](int64_t tensor, int64_t begin, int64_t end) {
      expect(0 <= begin && begin < end, "piece %ld to %ld is not empty", long(begin), long(end));
      expect(end <= row.sizes[tensor], "piece to %ld ends with its tensor", long(end));
      expect(row.begins[tensor] + begin == reached, "piece starts where the last one ended");
      expect(begin % kChunk == 0, "piece begins at %ld, within a chunk", long(begin));
      expect(end % kChunk == 0 || end == row.sizes[tensor], "piece ends at %ld, within a chunk",
             long(end));
      reached = row.begins[tensor] + end;
      visited += end - begin;
    };
    dsx::for_each_piece<kChunk>(row.begins.data(), int64_t(row.sizes.size()), cuts[i], cuts[i + 1],
                                visit);
    expect(visited < cuts[i + 1] - cuts[i] + kChunk, "a range takes less than a chunk too much");
  }
  expect(reached == row.end(), "reached %ld of %ld", long(reached), long(row.end()));
}

template <int64_t kChunk>
void test_row(const Row& row, std::mt19937_64& random) {
  test_cuts<kChunk>(row, {0, row.end()});
  for (int64_t parts : {2, 3, 7, 64}) {
    std::vector<int64_t> equal, drawn{0, row.end()};
    for (int64_t part = 0; part <= parts; ++part) equal.push_back(row.end() / parts * part);
    equal.push_back(row.end());
    for (int64_t part = 1; part < parts; ++part) {
      drawn.push_back(int64_t(random() % uint64_t(row.end() + 1)));
    }
    std::sort(drawn.begin(), drawn.end());
    test_cuts<kChunk>(row, equal);
    test_cuts<kChunk>(row, drawn);
  }
  if (row.end() > 300) return;
  std::vector<int64_t> everywhere;
  for (int64_t cut = 0; cut <= row.end(); ++cut) everywhere.push_back(cut);
  test_cuts<kChunk>(row, everywhere);
}

}  // namespace

int main() {
  std::mt19937_64 random(7);
  std::vector<Row> rows;
  const std::vector<int64_t> lists[] = {
      {}, {0}, {1}, {0, 0, 5, 0}, {3, 0, 0, 4, 1}, {100}, {1, 1, 1, 1, 1, 1, 1}, {64, 0, 64, 7}};
  const std::vector<int64_t> long_lists[] = {
      {63, 65, 1}, {4096, 4095, 4097, 1}, {10000, 3, 12289}, {5'000'000'001, 3, 3'000'000'000}};
  for (const std::vector<int64_t>& sizes : lists) rows.emplace_back(sizes);
  for (const std::vector<int64_t>& sizes : long_lists) rows.emplace_back(sizes);
  for (int list = 0; list < 50; ++list) {
    std::vector<int64_t> sizes(random() % 12);
    for (int64_t& size : sizes) size = int64_t(random() % 3 == 0 ? random() % 20000 : random() % 9);
    rows.emplace_back(sizes);
  }
  for (const Row& row : rows) {
    test_row<1>(row, random);
    test_row<3>(row, random);
    test_row<64>(row, random);
    test_row<dsx::kElementwiseChunk>(row, random);
  }
  return finish();
}
