// Tests the operations of Vec and Mask in every ISA that this CPU has, bit for bit: against plain
// C++; while subnormals are flushed to zero, against the scalar ISA, with subnormals read as zero.
#include <cmath>
#include <vector>

#include "expect.h"
#include "flush.h"
#include "vec_ops.h"

#define DSX_KERNEL_SOURCE "vec_ops.inl"
#include "common/simd/foreach_isa.h"

namespace {

using dsx::Isa;

constexpr int kMaxLanes = 16;

uint32_t bits_of(float value, bool flush) {
  const uint32_t bits = dsx::bits_of(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fc00000;  // sign and payload of a NaN are not specified
  return flush && magnitude < 0x00800000 ? bits & 0x80000000 : bits;
}

struct Operands {  // every pair of the values at which an operation can go wrong
  std::vector<float> a, b;

  Operands() {
    const float small[] = {0, 1e-45f, 1e-40f, 0x1p-126f, 1e-30f, 0.25f, 0.49999997f, 0.5f, 0.75f};
    const float middle[] = {1, 1.5f, 2.5f, 3.5f, 7.3f, 1e5f, 4194304.5f, 8388607.5f, 8388609};
    const float large[] = {3e9f, 1e30f, 3.4028235e38f, INFINITY, NAN};
    std::vector<float> values;
    for (float value : small) values.insert(values.end(), {value, -value});
    for (float value : middle) values.insert(values.end(), {value, -value});
    for (float value : large) values.insert(values.end(), {value, -value});
    for (float x : values) {
      for (float y : values) {
        a.push_back(x);
        b.push_back(y);
      }
    }
  }
};

using Kernel = void(const float*, const float*, float*, int64_t);

void test_op(const char* name, Isa isa, Kernel* kernel, const Operands& operands,
             const std::vector<float>& expected, bool flush) {
  std::vector<float> result(expected.size());
  flush_subnormals(flush);
  kernel(operands.a.data(), operands.b.data(), result.data(), int64_t(result.size()));
  flush_subnormals(false);
  for (size_t i = 0; i < result.size(); ++i) {
    expect(bits_of(result[i], flush) == bits_of(expected[i], flush),
           "%s: %s of %a and %a is %a, expected %a", name_of(isa), name, operands.a[i],
           operands.b[i], result[i], expected[i]);
  }
}

void test_ops(Isa isa, const Operands& operands, bool flush) {
  std::vector<float> expected(operands.a.size());
#define TEST_OP(name, with_vec, with_float)                                       \
  for (size_t i = 0; i < expected.size(); ++i) {                                  \
    const float a = operands.a[i];                                                \
    const float b [[maybe_unused]] = operands.b[i];                               \
    expected[i] = with_float;                                                     \
  }                                                                               \
  if (flush) {                                                                    \
    flush_subnormals(true);                                                       \
    dsx::scalar::op_##name(operands.a.data(), operands.b.data(), expected.data(), \
                           int64_t(expected.size()));                             \
    flush_subnormals(false);                                                      \
  }                                                                               \
  test_op(#name, isa, DSX_DISPATCH_ISA(isa, op_##name), operands, expected, flush);
  VEC_OPS(TEST_OP)
#undef TEST_OP
}

void test_any(Isa isa, int size) {
  float lanes[kMaxLanes] = {};
  for (int lane = 0; lane < size; ++lane) {
    lanes[lane] = 5;
    expect(DSX_DISPATCH_ISA(isa, any_equal(lanes, 5)), "%s: any sees lane %d", name_of(isa), lane);
    expect(!DSX_DISPATCH_ISA(isa, any_equal(lanes, 6)), "%s: any sees nothing", name_of(isa));
    lanes[lane] = 0;
  }
}

// for_each_vector: full vectors, then at most one shorter one, and every element once.
void test_range(Isa isa, int size, int64_t begin, int64_t end) {
  int64_t starts[4 * kMaxLanes];
  int counts[4 * kMaxLanes];
  const int64_t calls = DSX_DISPATCH_ISA(isa, visits(begin, end, starts, counts));
  int64_t next = begin;
  for (int64_t call = 0; call < calls; ++call) {
    const bool last = call == calls - 1;
    expect(starts[call] == next, "%s: vector starts where the last ended", name_of(isa));
    expect(counts[call] == size || (last && counts[call] > 0 && counts[call] < size),
           "%s: a vector of %d", name_of(isa), counts[call]);
    next += counts[call];
  }
  expect(next == end, "%s: %ld to %ld is visited", name_of(isa), long(begin), long(end));
}

}  // namespace

int main() {
  const Operands operands;
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > dsx::current_isa()) break;
    const int size = DSX_DISPATCH_ISA(isa, lanes_of_vec());
    std::printf("%s, %d lanes\n", name_of(isa), size);
    for (bool flush : {false, true}) test_ops(isa, operands, flush);
    test_any(isa, size);
    for (int64_t begin : {0, 3}) {
      for (int64_t n = 0; n <= 3 * size + 1; ++n) test_range(isa, size, begin, begin + n);
    }
  }
  return finish();
}
