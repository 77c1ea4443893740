// What the checks and kernels need to know of a tensor, read once: a list of ten thousand tensors
// is looked at in every optimizer step, and each question to torch is a call across the C boundary.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

namespace dsx {

inline char* address_of(AtenTensorHandle tensor) {
  void* address = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &address));
  return static_cast<char*>(address);
}

struct TensorView {
  AtenTensorHandle handle;  // borrowed
  char* data;
  int64_t numel;
  int64_t dim;
  const int64_t* sizes;    // [dim] owned by the tensor
  const int64_t* strides;  // [dim] owned by the tensor
  int32_t dtype;           // torch's code
  int32_t device_type;     // torch's code
  int32_t device_index;

  explicit TensorView(AtenTensorHandle tensor) : TensorView(tensor, address_of(tensor)) {}

  // `address` is that of the tensor's data, known already.
  TensorView(AtenTensorHandle tensor, char* address) : handle(tensor), data(address) {
    int64_t* sizes_address = nullptr;
    int64_t* strides_address = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &numel));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes_address));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides_address));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &device_index));
    sizes = sizes_address;
    strides = strides_address;
  }

  bool same_device(const TensorView& other) const {
    return device_type == other.device_type && device_index == other.device_index;
  }

  bool same_shape(const TensorView& other) const {
    if (dim != other.dim) return false;
    for (int64_t i = 0; i < dim; ++i) {
      if (sizes[i] != other.sizes[i]) return false;
    }
    return true;
  }

  // The elements of both, which have the same shape, lie in the same order.
  bool same_layout(const TensorView& other) const {
    if (numel < 2) return true;
    for (int64_t i = 0; i < dim; ++i) {
      if (strides[i] != other.strides[i] && sizes[i] != 1) return false;
    }
    return true;
  }

  // The elements fill their memory in the order of the dimensions, without gaps or overlaps.
  bool is_contiguous() const {
    if (numel < 2) return true;
    int64_t filled = 1;  // by the dimensions looked at so far
    for (int64_t i = dim - 1; i >= 0; --i) {
      if (sizes[i] == 1) continue;
      if (strides[i] != filled) return false;
      filled *= sizes[i];
    }
    return true;
  }

  // The same in some order of the dimensions.
  bool is_dense() const { return is_contiguous() || is_dense_in_any_order(); }

 private:
  bool is_dense_in_any_order() const {
    int64_t filled = 1;
    while (filled < numel) {  // find the dimension that continues where the others end
      int64_t next = 0;
      while (next < dim && (sizes[next] == 1 || strides[next] != filled)) ++next;
      if (next == dim) return false;
      filled *= sizes[next];
    }
    return true;
  }
};

}  // namespace dsx
