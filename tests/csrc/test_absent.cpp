// Tests what rows.h and pointer.h promise of what is absent: it stays so where rows are picked, and
// arithmetic on it aborts in builds with DSX_CHECKED. That is tried by the name of a case, which
// is then the only argument.
#include <cstring>

#include "attention/cache/rope.h"
#include "common/rows.h"
#include "expect.h"

namespace {

using dsx::Any;
using dsx::BFloat16;

// Whether there is such a case, and it came back.
bool move_from_absent(const char* name) {
  const dsx::Rows absent, with_pitch{.pitch = 8};
  const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("typed")) return bool(absent.row<BFloat16>(0) + 1);
  if (is("any")) return bool(absent.row<Any>(0) + 1);
  if (is("pitch")) return bool(with_pitch.row<float>(1));
  if (is("even_row")) return bool(with_pitch.even_row<float>(1));
  if (is("from")) return absent.from(1).is_present();
  if (is("heads")) return bool(dsx::Heads{.of_head = 64}.at<float>(0, 0, 1));
  return false;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) return move_from_absent(arguments[1]) ? 0 : 1;
  const dsx::Rows absent;
  expect(!absent.is_present(), "rows are present by default");
  expect(!absent.row<float>(3) && !absent.row<Any>(3), "a row of absent rows is present");
  expect(!(absent.row<Any>(0) + 0), "what is absent is present from element 0 on");
  expect(!absent.from(0).is_present(), "absent rows are present from column 0 on");
  float element = 0;
  const dsx::Rows present{.data = &element};
  expect(present.is_present() && (present.row<Any>(3) + 0).address == &element,
         "a row of pitch 0 is not where its data is");
  return finish();
}
