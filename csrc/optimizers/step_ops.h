// What every optimizer op takes: parameters and gradients as lists, state as lists or as slabs.
// Checks all of it and hands out addresses.
#pragma once

#include <limits>
#include <optional>

#include "common/scalar.h"
#include "common/torch/arguments.h"
#include "common/torch/checks.h"

namespace dsx {

// One state argument of an op: parameter i's part of it, wherever that lies.
class State {
 public:
  State() = default;  // absent: every address is null
  State(std::vector<char*> addresses) : addresses_(std::move(addresses)) {}
  State(char* slab, const int64_t* places, int64_t element_bytes, int64_t places_per_element = 1)
      : slab_(slab),
        places_(places),
        element_bytes_(element_bytes),
        places_per_element_(places_per_element) {}

  void* operator[](size_t i) const {
    if (slab_ != nullptr) return slab_ + places_[i] / places_per_element_ * element_bytes_;
    return addresses_.empty() ? nullptr : addresses_[i];
  }

 private:
  std::vector<char*> addresses_;
  char* slab_ = nullptr;
  const int64_t* places_ = nullptr;
  int64_t element_bytes_ = 0;
  int64_t places_per_element_ = 1;
};

// A list of integers that came as a tensor of int64 in host memory: torch takes a list of numbers
// apart one by one, which for a small parameter costs nearly as much as its step.
struct Integers64 {
  const int64_t* values = nullptr;
  size_t count = 0;

  // One dimension; or two, of which the second has `columns`.
  Integers64(const char* op, const char* name, const std::optional<torch::stable::Tensor>& tensor,
             int64_t columns = 1) {
    if (!tensor.has_value()) return;
    const TensorView view(tensor->get());
    check(view.device_type == aoti_torch_device_type_cpu(), op, ": ", name, " is on ",
          DeviceCode{view.device_type, view.device_index}, ", expected cpu");
    check(view.dtype == aoti_torch_dtype_int64(), op, ": ", name, " is ", DtypeCode{view.dtype},
          ", expected int64");
    if (columns == 1) {
      check_flat(op, {name}, view);
    } else {
      const bool in_rows = view.dim == 2 && view.sizes[1] == columns && view.strides[1] == 1 &&
                           (view.sizes[0] < 2 || view.strides[0] == columns);
      check(in_rows, op, ": ", name, " has shape ", Integers{view.sizes, view.dim}, " and strides ",
            Integers{view.strides, view.dim}, ", expected [n, ", columns, "], contiguous");
    }
    values = reinterpret_cast<const int64_t*>(view.data);
    count = size_t(view.numel / columns);
  }

  bool empty() const { return count == 0; }
  int64_t operator[](size_t i) const { return values[i]; }
};

class StepArguments {
 public:
  // Checks parameters and gradients; null: the op takes none. Offsets and slots are absent if state
  // comes as lists.
  StepArguments(const char* op, const TensorList& params, const TensorList* grads,
                const std::optional<torch::stable::Tensor>& offsets,
                const std::optional<torch::stable::Tensor>& slots)
      : op_(op),
        params_(params),
        offsets_(op, "offsets", offsets),
        slots_(op, "slots", slots),
        device_(params[0]),
        param_addresses_(params.addresses()),
        grad_addresses_(grads == nullptr ? std::vector<char*>(params.size()) : grads->addresses()),
        numels_(params.size()),
        memory_(op, 2 * params.size()) {
    if (grads != nullptr) check_length(op, "grads", grads->size(), params.size());
    if (!offsets_.empty() || !slots_.empty()) {
      check_length(op_, "offsets", offsets_.count, count());
      check_length(op_, "slots", slots_.count, count());
    }
    param_dtype_ = storage_dtype(op, {"params", 0}, device_);
    if (grads != nullptr) grad_dtype_ = storage_dtype(op, {"grads", 0}, TensorView((*grads)[0]));
    for (size_t i = 0; i < count(); ++i) {
      const TensorView param(params[i], param_addresses_[i]);
      numels_[i] = param.numel;
      check_param(i, param);
      if (grads != nullptr) check_grad(i, TensorView((*grads)[i], grad_addresses_[i]), param);
    }
    check_places();
  }

  size_t count() const { return numels_.size(); }
  int64_t numel(size_t i) const { return numels_[i]; }
  void* param(size_t i) const { return param_addresses_[i]; }
  void* grad(size_t i) const { return grad_addresses_[i]; }
  Dtype param_dtype() const { return param_dtype_; }
  Dtype grad_dtype() const { return grad_dtype_; }
  int32_t device_index() const { return device_.device_index; }

  // State with an element for every element of its parameter.
  State state(const char* name, const TensorList& tensors, Dtype dtype) {
    if (!offsets_.empty()) {
      return slab(name, tensors, dtype, offsets_, offsets_end_);
    }
    check_length(op_, name, tensors.size(), count());
    std::vector<char*> addresses(count());
    for (size_t i = 0; i < count(); ++i) {
      const TensorView view(tensors[i]);
      const TensorView param(params_[i]);
      check_device(op_, {name, i}, view, device_);
      check_dtype(op_, {name, i}, view, dtype);
      check_shape(op_, {name, i}, view, param);
      check_layout(op_, {name, i}, view, param);
      memory_.add({name, i}, view, bytes_of(dtype), Access::write);
      addresses[i] = view.data;
    }
    return State(std::move(addresses));
  }

  // Float32 scales of state in codes, one for each of its blocks: the slab or list of state `index`
  // of `states`.
  State scales(const TensorList& tensors, size_t index, size_t states) {
    const char* name = "scales";
    if (!offsets_.empty()) {
      check_length(op_, name, tensors.size(), states);
      for (size_t i = 0; i < offsets_.count; ++i) {
        check(offsets_[i] % kCodesBlock == 0, op_, ": ", Item{"offsets", i}, " is ", offsets_[i],
              ", expected a multiple of ", kCodesBlock);
      }
      const TensorView view(tensors[index]);
      add_slab({name, index}, view, Dtype::float32, blocks_of(offsets_end_));
      return State(view.data, offsets_.values, bytes_of(Dtype::float32), kCodesBlock);
    }
    check_length(op_, name, tensors.size(), states * count());
    std::vector<char*> addresses(count());
    for (size_t i = 0; i < count(); ++i) {
      const Item item{name, index * count() + i};
      const TensorView view(tensors[item.index]);
      add_slab(item, view, Dtype::float32, blocks_of(numels_[i]));
      addresses[i] = view.data;
    }
    return State(std::move(addresses));
  }

  // State with one float32 for each parameter.
  State steps(const char* name, const TensorList& tensors) {
    if (!slots_.empty()) return slab(name, tensors, Dtype::float32, slots_, slots_end_);
    check_length(op_, name, tensors.size(), count());
    std::vector<char*> addresses(count());
    for (size_t i = 0; i < count(); ++i) {
      const TensorView view(tensors[i]);
      check_one_element({name, i}, view);
      check_dtype(op_, {name, i}, view, Dtype::float32);
      memory_.add({name, i}, view, bytes_of(Dtype::float32), Access::write);
      addresses[i] = view.data;
    }
    return State(std::move(addresses));
  }

  // A number on the device, or the constant if the tensor is absent.
  Scalar scalar(const char* name, const std::optional<torch::stable::Tensor>& tensor,
                double constant) {
    if (!tensor.has_value()) return {.constant = constant};
    const TensorView view(tensor->get());
    check_one_element({name}, view);
    if (view.dtype == aoti_torch_dtype_float64()) {
      memory_.add({name}, view, sizeof(double), Access::read);
      return {.double_address = reinterpret_cast<const double*>(view.data)};
    }
    check(view.dtype == aoti_torch_dtype_float32(), op_, ": ", name, " is ", DtypeCode{view.dtype},
          ", expected float32 or float64");
    memory_.add({name}, view, sizeof(float), Access::read);
    return {.float_address = reinterpret_cast<const float*>(view.data)};
  }

  // A float32 on the device for each parameter.
  const float* factors(const char* name, AtenTensorHandle tensor) {
    const TensorView view(tensor);
    check_device(op_, {name}, view, device_);
    check_dtype(op_, {name}, view, Dtype::float32);
    check_flat(op_, {name}, view);
    check_length(op_, name, size_t(view.numel), count());
    memory_.add({name}, view, sizeof(float), Access::read);
    return reinterpret_cast<const float*>(view.data);
  }

  // A new tensor of doubles with so many columns for each parameter.
  torch::stable::Tensor new_doubles(int64_t columns) const {
    const int64_t sizes[] = {int64_t(count()), columns}, strides[] = {columns, 1};
    AtenTensorHandle result = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, sizes, strides, aoti_torch_dtype_float64(),
                                                    device_.device_type, device_.device_index,
                                                    &result));
    return torch::stable::Tensor(result);
  }

  // Nothing that the op writes shares memory with anything else. Call it when all state was given.
  void check_separate() { memory_.check_separate(); }

 private:
  void check_param(size_t i, const TensorView& param) {
    check_device(op_, {"params", i}, param, device_);
    check_dtype(op_, {"params", i}, param, param_dtype_);
    check_dense(op_, {"params", i}, param);
    memory_.add({"params", i}, param, bytes_of(param_dtype_), Access::write);
  }

  void check_grad(size_t i, const TensorView& grad, const TensorView& param) {
    check_device(op_, {"grads", i}, grad, device_);
    check_dtype(op_, {"grads", i}, grad, grad_dtype_);
    check_shape(op_, {"grads", i}, grad, param);
    if (grad.same_layout(param)) {
      memory_.add({"grads", i}, grad, bytes_of(grad_dtype_), Access::read);
    } else {
      grad_addresses_[i] = copy_to_layout({"grads", i}, grad, param);
    }
  }

  // Kernels read all tensors of a parameter in one order. A gradient that lies in another one
  // (a transposed parameter often gets a contiguous gradient) is copied into that of the parameter.
  char* copy_to_layout(const Item& item, const TensorView& grad, const TensorView& param) {
    check_memory(op_, item, grad);
    AtenTensorHandle copy = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(param.dim, param.sizes, param.strides,
                                                    grad.dtype, grad.device_type, grad.device_index,
                                                    &copy));
    relaid_grads_.push_back(copy);
    TORCH_ERROR_CODE_CHECK(aoti_torch_tensor_copy_(grad.handle, copy));
    return address_of(copy);
  }

  // Offsets and slots put every parameter behind the one before it.
  void check_places() {
    for (size_t i = 0; i < offsets_.count; ++i) {
      offsets_end_ = end_of_place({"offsets", i}, offsets_[i], offsets_end_, numels_[i]);
      slots_end_ = end_of_place({"slots", i}, slots_[i], slots_end_, 1);
    }
  }

  int64_t end_of_place(const Item& item, int64_t place, int64_t earliest, int64_t elements) {
    check(place >= earliest, op_, ": ", item, " is ", place, ", expected at least ", earliest);
    const int64_t latest = std::numeric_limits<int64_t>::max() - elements;
    check(place <= latest, op_, ": ", item, " is ", place, ", expected at most ", latest);
    return place + elements;
  }

  void check_one_element(const Item& item, const TensorView& view) {
    check_device(op_, item, view, device_);
    check(view.numel == 1, op_, ": ", item, " has ", view.numel, " elements, expected 1");
  }

  // `places` are offsets or slots; the slab holds at least `elements`.
  State slab(const char* name, const TensorList& tensors, Dtype dtype, const Integers64& places,
             int64_t elements) {
    check_length(op_, name, tensors.size(), 1);
    const TensorView view(tensors[0]);
    add_slab({name, 0}, view, dtype, elements);
    return State(view.data, places.values, bytes_of(dtype));
  }

  void add_slab(const Item& item, const TensorView& view, Dtype dtype, int64_t elements) {
    check_device(op_, item, view, device_);
    check_dtype(op_, item, view, dtype);
    check_flat(op_, item, view);
    check(view.numel >= elements, op_, ": ", item, " has ", view.numel,
          " elements, expected at least ", elements);
    memory_.add(item, view, bytes_of(dtype), Access::write);
  }

  static int64_t blocks_of(int64_t elements) { return ceil_div(elements, kCodesBlock); }

  const char* op_;
  const TensorList& params_;
  const Integers64 offsets_;
  const Integers64 slots_;
  const TensorView device_;  // any tensor of the device that all must be on: the first parameter
  std::vector<char*> param_addresses_;
  std::vector<char*> grad_addresses_;
  std::vector<int64_t> numels_;
  int64_t offsets_end_ = 0;  // elements that slabs must have
  int64_t slots_end_ = 0;    // and the slab of steps
  TensorList relaid_grads_;
  MemoryRanges memory_;
  Dtype param_dtype_;
  Dtype grad_dtype_{};
};

}  // namespace dsx
