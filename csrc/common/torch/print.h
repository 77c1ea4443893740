// How error messages show an argument, and a tensor's shape, strides, dtype and device.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <ostream>

#include "common/dtype.h"

namespace dsx {

struct Item {  // prints as `grads[3]`, or as `lr` if the argument is no list
  static constexpr size_t kNoList = size_t(-1);
  const char* argument;
  size_t index = kNoList;
  const char* prefix = "";  // of the argument's name
};

inline std::ostream& operator<<(std::ostream& out, Item item) {
  out << item.prefix << item.argument;
  return item.index == Item::kNoList ? out : out << '[' << item.index << ']';
}

// Prints a dtype by its name in Python: `float32`.
inline std::ostream& operator<<(std::ostream& out, Dtype dtype) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16"};  // indexed by Dtype
  return out << kNames[int(dtype)];
}

struct DtypeCode {  // prints as `float32`
  int32_t code;     // torch's
};

inline std::ostream& operator<<(std::ostream& out, DtypeCode dtype) {
  const struct {
    int32_t code;
    const char* name;
  } kNames[] = {
      {aoti_torch_dtype_float32(), "float32"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
  };
  for (const auto& known : kNames) {
    if (known.code == dtype.code) return out << known.name;
  }
  return out << "of torch's dtype number " << dtype.code;
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

struct DeviceCode {  // prints as `cpu` or `cuda:1`
  int32_t type;      // torch's
  int32_t index;
};

inline std::ostream& operator<<(std::ostream& out, DeviceCode device) {
  if (device.type == aoti_torch_device_type_cpu()) return out << "cpu";
#ifdef USE_CUDA  // torch never hands a CUDA tensor to a CPU kernel
  if (device.type == aoti_torch_device_type_cuda()) return out << "cuda:" << device.index;
#endif
  return out << "a device of torch's type number " << device.type;
}

}  // namespace dsx
