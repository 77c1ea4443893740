// How error messages show an item of a tensor list, and a tensor's shape, strides and device.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <ostream>

#include "common/dtype.h"

namespace dsx {

using torch::stable::Tensor;

struct Item {  // prints as `grads[3]`, or as `lr` if the argument is no list
  static constexpr size_t kNoList = size_t(-1);
  const char* argument;
  size_t index = kNoList;
};

inline std::ostream& operator<<(std::ostream& out, Item item) {
  out << item.argument;
  return item.index == Item::kNoList ? out : out << '[' << item.index << ']';
}

// Prints a dtype by its name in Python: `float32`.
inline std::ostream& operator<<(std::ostream& out, Dtype dtype) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16"};  // indexed by Dtype
  return out << kNames[int(dtype)];
}

struct DtypeOf {  // prints as `float32`; a rare one by its name in C++
                  // name
  const Tensor& tensor;
};

inline std::ostream& operator<<(std::ostream& out, DtypeOf dtype) {
  using torch::headeronly::ScalarType;
  switch (dtype.tensor.scalar_type()) {
    case ScalarType::Float: return out << Dtype::float32;
    case ScalarType::BFloat16: return out << Dtype::bfloat16;
    case ScalarType::Half: return out << Dtype::float16;
    case ScalarType::Long: return out << "int64";
    case ScalarType::Double: return out << "float64";
    default: return out << dtype.tensor.scalar_type();
  }
}

struct Integers {  // prints as `[2, 3]`
  const int64_t* values;
  int64_t count;
};

inline std::ostream& operator<<(std::ostream& out, Integers integers) {
  out << '[';
  for (int64_t i = 0; i < integers.count; ++i) out << (i == 0 ? "" : ", ") << integers.values[i];
  return out << ']';
}

struct DeviceOf {  // prints as `cpu` or `cuda:1`
  const Tensor& tensor;
};

inline std::ostream& operator<<(std::ostream& out, DeviceOf device) {
  if (device.tensor.is_cpu()) return out << "cpu";
#ifdef USE_CUDA  // torch never hands a CUDA tensor to a CPU kernel
  if (device.tensor.is_cuda()) return out << "cuda:" << device.tensor.get_device_index();
#endif
  return out << "another kind of device";
}

}  // namespace dsx
