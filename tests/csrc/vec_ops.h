// The operations of Vec that test_vec.cpp compares: each as a kernel writes it, and as plain C++
// defines it for the same floats a and b, in double where that is exact enough to round only once.
#pragma once

#include <cmath>

// A truth value as a float, for Vec and for float.
#define TRUTH(mask) select(mask, V(1.0f), V(0.0f))

inline float torch_max(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return NAN;
  return a > b ? a : b;
}

inline float torch_min(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return NAN;
  return a < b ? a : b;
}

inline float nearest_even(float a) {
  if (std::isnan(a) || std::isinf(a)) return a;
  const double below = std::floor(double(a));
  const double distance = double(a) - below;
  const bool up = distance > 0.5 || (distance == 0.5 && std::fmod(below, 2) != 0);
  return std::copysign(float(up ? below + 1 : below), a);
}

// OP(name, with Vec, with float)
#define VEC_OPS(OP)                                                   \
  OP(add, a + b, float(double(a) + double(b)))                        \
  OP(subtract, a - b, float(double(a) - double(b)))                   \
  OP(multiply, (a * b), float(double(a) * double(b)))                 \
  OP(divide, a / b, float(double(a) / double(b)))                     \
  OP(fused, multiply_add(a, b, V(0.75f)), std::fma(a, b, 0.75f))      \
  OP(negate, -a, std::copysign(a, std::signbit(a) ? 1.0f : -1.0f))    \
  OP(absolute, abs(a), std::copysign(a, 1.0f))                        \
  OP(root, sqrt(a), float(std::sqrt(double(a))))                      \
  OP(floor, floor(a), float(std::floor(double(a))))                   \
  OP(round, round_even(a), nearest_even(a))                           \
  OP(minimum, min(a, b), torch_min(a, b))                             \
  OP(maximum, max(a, b), torch_max(a, b))                             \
  OP(less, TRUTH(a < b), a < b ? 1 : 0)                               \
  OP(less_equal, TRUTH(a <= b), a <= b ? 1 : 0)                       \
  OP(greater, TRUTH(a > b), a > b ? 1 : 0)                            \
  OP(greater_equal, TRUTH(a >= b), a >= b ? 1 : 0)                    \
  OP(equal, TRUTH(a == b), a == b ? 1 : 0)                            \
  OP(not_equal, TRUTH(a != b), a != b ? 1 : 0)                        \
  OP(both, TRUTH((a < b) & (a == abs(a))), a < b && a >= 0 ? 1 : 0)   \
  OP(either, TRUTH((a < b) | (a == abs(a))), a < b || a >= 0 ? 1 : 0) \
  OP(not_less, TRUTH(!(a < b)), a < b ? 0 : 1)                        \
  OP(choose, select(a < b, a, b), a < b ? a : b)
