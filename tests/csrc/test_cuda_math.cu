// Tests exp, sigmoid and other functions of CUDA's Floats against double, for every float, within
// the bounds that floats.cuh states.
#include <cstdio>

#include "common/cuda/floats.cuh"

namespace {

using dsx::cuda::Floats;

constexpr const char* kNames[] = {"exp",       "sigmoid",      "rsqrt",          "erf",
                                  "tanh",      "distribution", "density",        "small sin",
                                  "small cos", "log",          "exp_of_negative"};
// In units of the last place.
constexpr double kBounds[] = {2, 5, 1.5, 3, 7, 10, 4, 2, 2, 1.5, 2};
// What is added to them for each 1 of the argument's square, and of its magnitude.
constexpr __device__ double kGrowth[] = {0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0};
constexpr __device__ double kSlope[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2};
constexpr int kFunctions = 11;

struct Found {
  unsigned long long worst_bits[kFunctions];  // of doubles that are not negative: they rise alike
  unsigned long long wrong[kFunctions], tested;
};

template <int function>
__device__ double right(double a) {
  switch (function) {
    case 0: return ::exp(a);
    case 1: return 1 / (1 + ::exp(-a));
    case 2: return 1 / ::sqrt(a);
    case 3: return ::erf(a);
    case 4: return ::tanh(a);
    case 5: return ::erfc(a * -0.70710678118654752) / 2;
    case 6: return ::exp(-a * a / 2) * 0.398942280401432678;
    case 7: return ::sin(a);
    case 8: return ::cos(a);
    case 9: return ::log(a);
    default: return ::exp(a);
  }
}

template <int function>
__device__ float ours(Floats<1> a) {
  switch (function) {
    case 0: return exp(a).lanes[0];
    case 1: return sigmoid(a).lanes[0];
    case 2: return rsqrt(a).lanes[0];
    case 3: return erf(a).lanes[0];
    case 4: return tanh(a).lanes[0];
    case 5: return normal(a).distribution.lanes[0];
    case 6: return normal(a).density.lanes[0];
    case 7: return small_sin(a).lanes[0];
    case 8: return small_cos(a).lanes[0];
    case 9: return log(a).lanes[0];
    default: return exp_of_negative(a).lanes[0];
  }
}

// The distance of floats near `value`.
__device__ double last_place(double value) {
  const double place = value == 0 ? 0 : ::ldexp(1.0, ::ilogb(value) - 23);
  return ::fmax(place, 0x1p-149);
}

template <int function>
__device__ void test(float a, Found* found) {
  if (function >= 7 && !(::fabsf(a) <= 0.78539819f)) return;
  const double want = right<function>(double(a));
  const float got = ours<function>(Floats<1>(a));
  if (isnan(want) ? isnan(got) : double(got) == want || got == float(want)) return;
  if (!isfinite(want) || !isfinite(got)) {
    // The largest float and infinity are neighbours.
    if (!(fabs(want) > 3.4028234e38)) atomicAdd(&found->wrong[function], 1ull);
    return;
  }
  const bool of_normal = function == 5 || function == 6;
  const bool flushes = of_normal || function == 1 || function == 10;
  const bool lost = flushes && got == 0 && want < (of_normal ? 0x1p-125 : 0x1p-126);
  const double size = ::fabs(double(a));
  double more = 0;  // for an infinite argument too, which 0 times it is not
  if (kGrowth[function] != 0) more += kGrowth[function] * size * size;
  if (kSlope[function] != 0) more += kSlope[function] * size;
  const double error = ::fmax(::fabs(double(got) - want) / last_place(want) - more, 0.0);
  if (!lost) {
    atomicMax(&found->worst_bits[function], (unsigned long long)__double_as_longlong(error));
  }
}

__global__ void test_all(Found* found) {
  unsigned long long tested = 0;
  const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t bits = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; bits < 1ull << 32;
       bits += step, ++tested) {
    const float a = dsx::float_of(uint32_t(bits));
    test<0>(a, found);
    test<1>(a, found);
    test<2>(a, found);
    test<3>(a, found);
    test<4>(a, found);
    test<5>(a, found);
    test<6>(a, found);
    test<7>(a, found);
    test<8>(a, found);
    test<9>(a, found);
    if (!(a > 0)) test<10>(a, found);
  }
  atomicAdd(&found->tested, tested);
}

}  // namespace

int main() {
  Found* device = nullptr;
  Found found{};
  cudaMalloc(&device, sizeof(found));
  cudaMemset(device, 0, sizeof(found));
  test_all<<<2048, 256>>>(device);
  if (cudaMemcpy(&found, device, sizeof(found), cudaMemcpyDeviceToHost) != cudaSuccess) {
    std::printf("CUDA: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 1;
  }
  bool right = found.tested == 1ull << 32;
  for (int f = 0; f < kFunctions; ++f) {
    double worst;
    memcpy(&worst, &found.worst_bits[f], sizeof(worst));
    std::printf("%s: off by %.3f at most, %llu are wrong\n", kNames[f], worst, found.wrong[f]);
    right = right && found.wrong[f] == 0 && worst <= kBounds[f];
  }
  return right ? 0 : 1;
}
