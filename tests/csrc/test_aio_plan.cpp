// Tests aio/plan.h: whatever the offset, address, length, alignment and block, the pieces cover the
// transfer once and in order, direct ones are aligned, and no granule is met both ways.
#include "aio/plan.h"

#include "expect.h"

namespace {

using dsx::aio::Alignment;
using dsx::aio::Piece;
using dsx::aio::Plan;

struct Case {
  int64_t offset;
  uintptr_t address;
  int64_t bytes;
  Alignment alignment;
};

bool is_direct_as_possible(const Case& c, const Plan& plan) {
  const int64_t granule = c.alignment.granule;
  if (granule == 0) return plan.middle == 0;
  const int64_t head = (granule - c.offset % granule) % granule;
  const int64_t middle = c.bytes <= head ? 0 : (c.bytes - head) / granule * granule;
  return plan.middle == middle && (middle == 0 || plan.head == head);
}

bool is_aligned(const Case& c, const Piece& piece) {
  const int64_t granule = c.alignment.granule;
  const bool memory = (c.address + uintptr_t(piece.start)) % uintptr_t(c.alignment.memory) == 0;
  return (c.offset + piece.start) % granule == 0 && piece.bytes % granule == 0 &&
         (memory || piece.copied);
}

void test_pieces(const Case& c, int64_t block, int64_t page_buffer) {
  const Plan plan = dsx::aio::make_plan(c.offset, c.address, c.bytes, c.alignment);
  const int64_t granule = c.alignment.granule;
  expect(plan.head >= 0 && plan.middle >= 0 && plan.tail >= 0, "no part is negative");
  expect(plan.head + plan.middle + plan.tail == c.bytes, "the parts are the whole");
  expect(is_direct_as_possible(c, plan), "offset %ld, %ld bytes, granule %ld: middle is %ld",
         long(c.offset), long(c.bytes), long(granule), long(plan.middle));
  int64_t reached = 0;
  Piece last{};
  while (reached < c.bytes) {
    const Piece piece = dsx::aio::cut_piece(plan, reached, block, page_buffer);
    expect(piece.start == reached, "piece starts at %ld, not %ld", long(piece.start),
           long(reached));
    expect(piece.bytes > 0 && piece.bytes <= c.bytes - reached, "piece of %ld bytes, %ld left",
           long(piece.bytes), long(c.bytes - reached));
    if (piece.bytes <= 0) return;
    expect(piece.bytes <= (piece.direct ? std::max(block, granule) : block),
           "piece of %ld bytes in blocks of %ld", long(piece.bytes), long(block));
    expect(!piece.copied || piece.bytes <= std::max(page_buffer, granule), "a copied piece fits");
    expect(!piece.copied || piece.direct, "only direct pieces are copied");
    expect(!piece.direct || is_aligned(c, piece), "direct piece at %ld is aligned",
           long(c.offset + piece.start));
    if (reached > 0 && piece.direct != last.direct) {
      expect((c.offset + reached) % granule == 0, "%ld is within a granule met both ways",
             long(c.offset + reached));
    }
    last = piece;
    reached += piece.bytes;
  }
  expect(reached == c.bytes, "reached %ld of %ld", long(reached), long(c.bytes));
}

void test_small() {
  for (int64_t granule : {0, 1, 2, 4, 8}) {
    for (int64_t memory : {1, 2, 8}) {
      if (memory > std::max(granule, int64_t{1})) continue;
      for (uintptr_t address = 0; address < uintptr_t(2 * memory); ++address) {
        for (int64_t offset = 0; offset <= 2 * granule + 1; ++offset) {
          for (int64_t bytes = 0; bytes <= 4 * granule + 3; ++bytes) {
            for (int64_t block : {1, 2, 3, 7, 8, 9, 16, 100}) {
              for (int64_t pages : {1, 2, 5}) {
                test_pieces({offset, address, bytes, {granule, memory}}, block,
                            pages * std::max(granule, int64_t{1}));
              }
            }
          }
        }
      }
    }
  }
}

void test_large() {
  const int64_t mib = 1 << 20, gib = 1 << 30;
  for (int64_t granule : {4096, 65536}) {
    for (int64_t memory : {int64_t{1}, int64_t{512}, granule}) {
      for (uintptr_t address : {0x7f00'0000'0000u, 0x7f00'0000'0001u, 0x7f00'0000'0200u}) {
        for (int64_t offset : {int64_t{0}, int64_t{1}, 5 * gib - 1, INT64_MAX - 4 * gib}) {
          for (int64_t bytes : {int64_t{4095}, mib, 3 * gib + 5}) {
            test_pieces({offset, address, bytes, {granule, memory}}, 16 * mib, mib);
          }
        }
        for (int64_t bytes : {int64_t{1}, int64_t{4096}, int64_t{65536}, 2 * mib + 1}) {
          test_pieces({INT64_MAX - bytes, address, bytes, {granule, memory}}, mib, mib);
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_small();
  test_large();
  return finish();
}
