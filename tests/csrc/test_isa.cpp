// Tests common/simd/isa.h. With the argument "current" it names the ISA of this process instead, or
// the error, so that test_csrc.py can try values of DSX_FORCE_ISA and other CPUs.
#include "common/simd/isa.h"

#include <cstring>
#include <stdexcept>

#include "expect.h"

namespace {

using dsx::Isa;

void expect_choice(const char* forced, Isa widest, Isa expected) {
  const Isa chosen = dsx::choose_isa(forced, widest);
  expect(chosen == expected, "'%s' of %s gives %s", forced, name_of(widest), name_of(chosen));
}

void expect_error(const char* forced, Isa widest, const std::string& expected) {
  std::string text = "no error";
  try {
    dsx::choose_isa(forced, widest);
  } catch (const std::invalid_argument& error) {
    text = error.what();
  }
  expect(text == expected, "'%s', expected '%s'", text.c_str(), expected.c_str());
}

int print_current() {
  try {
    std::puts(name_of(dsx::current_isa()));
    return 0;
  } catch (const std::invalid_argument& error) {
    std::puts(error.what());
    return 1;
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "current") == 0) return print_current();
  const Isa all[] = {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512};
  for (Isa widest : all) {
    expect_choice("", widest, widest);
    for (Isa isa : all) {
      if (isa <= widest) expect_choice(name_of(isa), widest, isa);
    }
  }
  const std::string reason = ", expected one that this library has for this CPU: ";
  const std::string all_of_avx2 = reason + "scalar, " + name_of(Isa::baseline) + ", avx2";
  expect_error("avx512", Isa::avx2, "DSX_FORCE_ISA is avx512" + all_of_avx2);
  expect_error("avx2", Isa::scalar, "DSX_FORCE_ISA is avx2" + reason + "scalar");
  expect_error("vmx", Isa::avx512, "DSX_FORCE_ISA is vmx" + all_of_avx2 + ", avx512");
  expect_error("AVX2", Isa::avx2, "DSX_FORCE_ISA is AVX2" + all_of_avx2);
  expect(dsx::current_isa() == dsx::current_isa(), "the ISA is decided once");
  return finish();
}
