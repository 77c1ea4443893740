// What every optimizer op takes: parameters and gradients as lists, state as lists or as slabs, and
// where it is written, if not in place. Checks all of it and hands out addresses.
#pragma once

#include <limits>
#include <optional>

#include "common/math.h"
#include "optimizers/scalar.h"
#include "common/torch/arguments.h"
#include "common/torch/new_tensor.h"
#include "optimizers/storage.h"

namespace dsx {

using OptionalTensor = std::optional<torch::stable::Tensor>;

inline int32_t torch_code(Format format) {
  switch (format) {
    case Format::split: return aoti_torch_dtype_int16();  // the lower halves
    case Format::codes: return aoti_torch_dtype_uint8();
    default: return torch_code(dtype_of(format));
  }
}

// Prints the dtype of a format by its name in Python: of a split float that of the lower halves.
inline std::ostream& operator<<(std::ostream& out, Format format) {
  return out << DtypeCode{torch_code(format)};
}

// Where parameter i's part of an argument lies, for every i.
class Addresses {
 public:
  Addresses() = default;  // absent: every address is null
  Addresses(std::vector<char*> addresses) : addresses_(std::move(addresses)) {}
  Addresses(char* slab, const int64_t* places, int64_t element_bytes,
            int64_t places_per_element = 1)
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

// An argument that is updated: its name, the tensors that are read, and those that are written
// instead of them; null: the same.
struct Updated {
  const char* name;
  const TensorList& source;
  const TensorList* target;
};

struct UpdatedAddresses {
  Addresses source, target;
};

// A list of integers that came as a tensor of int64 in host memory: torch takes a list of numbers
// apart one by one, which for a small parameter costs nearly as much as its step.
struct Integers64 {
  const int64_t* values = nullptr;
  size_t count = 0;

  // One dimension; or two, of which the second has `columns`.
  Integers64(const char* op, const char* name, const OptionalTensor& tensor, int64_t columns = 1) {
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
  StepArguments(const char* op, const Updated& params, const TensorList* grads,
                const OptionalTensor& offsets, const OptionalTensor& slots)
      : op_(op),
        params_(params.source),
        offsets_(op, "offsets", offsets),
        slots_(op, "slots", slots),
        device_(params_[0]),
        param_addresses_(params_.addresses()),
        param_targets_(params.target == nullptr ? param_addresses_ : params.target->addresses()),
        grad_addresses_(grads == nullptr ? std::vector<char*>(params_.size()) : grads->addresses()),
        numels_(params_.size()),
        memory_(op, 2 * params_.size()) {
    if (grads != nullptr) check_length(op, {"grads"}, grads->size(), count());
    if (!offsets_.empty() || !slots_.empty()) {
      check_length(op_, {"offsets"}, offsets_.count, count());
      check_length(op_, {"slots"}, slots_.count, count());
    }
    check_target_length(params);
    param_dtype_ = storage_dtype(op, {"params", 0}, device_);
    if (grads != nullptr) grad_dtype_ = storage_dtype(op, {"grads", 0}, TensorView((*grads)[0]));
    for (size_t i = 0; i < count(); ++i) {
      const TensorView param(params_[i], param_addresses_[i]);
      numels_[i] = param.numel;
      check_param(i, param, params.target);
      if (grads != nullptr) check_grad(i, TensorView((*grads)[i], grad_addresses_[i]), param);
    }
    check_places();
  }

  size_t count() const { return numels_.size(); }
  int64_t numel(size_t i) const { return numels_[i]; }
  void* param(size_t i) const { return param_addresses_[i]; }
  void* param_target(size_t i) const { return param_targets_[i]; }
  void* grad(size_t i) const { return grad_addresses_[i]; }
  Dtype param_dtype() const { return param_dtype_; }
  Dtype grad_dtype() const { return grad_dtype_; }
  const TensorView& device() const { return device_; }

  // State with an element for every element of its parameter.
  UpdatedAddresses state(const Updated& state, Format format) {
    const TensorList& tensors = state.source;
    if (!offsets_.empty()) return slab(state, format, offsets_, offsets_end_);
    check_length(op_, {state.name}, tensors.size(), count());
    check_target_length(state);
    std::vector<char*> sources(count()), targets(count());
    for (size_t i = 0; i < count(); ++i) {
      const Item item{state.name, i};
      const TensorView view(tensors[i]);
      const TensorView param(params_[i], param_addresses_[i]);
      check_device(op_, item, view, device_);
      check_dtype(op_, item, view, format);
      check_shape(op_, item, view, param);
      check_layout(op_, item, view, param);
      sources[i] = view.data;
      targets[i] = add_updated(item, view, state.target, bytes_of(format));
    }
    return {Addresses(std::move(sources)), Addresses(std::move(targets))};
  }

  // Float32 scales of state in codes, one for each of its blocks: the slab or list of state `index`
  // of `states`.
  UpdatedAddresses scales(const Updated& scales, size_t index, size_t states) {
    const TensorList& tensors = scales.source;
    if (!offsets_.empty()) {
      check_length(op_, {scales.name}, tensors.size(), states);
      check_target_length(scales);
      for (size_t i = 0; i < offsets_.count; ++i) {
        check(offsets_[i] % kCodesBlock == 0, op_, ": ", Item{"offsets", i}, " is ", offsets_[i],
              ", expected a multiple of ", kCodesBlock);
      }
      const auto [source, target] =
          add_slab(scales, index, Format::float32, scales_of(offsets_end_));
      const int64_t bytes = bytes_of(Format::float32);
      return {Addresses(source, offsets_.values, bytes, kCodesBlock),
              Addresses(target, offsets_.values, bytes, kCodesBlock)};
    }
    check_length(op_, {scales.name}, tensors.size(), states * count());
    check_target_length(scales);
    std::vector<char*> sources(count()), targets(count());
    for (size_t i = 0; i < count(); ++i) {
      std::tie(sources[i], targets[i]) =
          add_slab(scales, index * count() + i, Format::float32, scales_of(numels_[i]));
    }
    return {Addresses(std::move(sources)), Addresses(std::move(targets))};
  }

  // State with one float32 for each parameter.
  UpdatedAddresses step_counts(const Updated& steps) {
    if (!slots_.empty()) return slab(steps, Format::float32, slots_, slots_end_);
    check_length(op_, {steps.name}, steps.source.size(), count());
    check_target_length(steps);
    std::vector<char*> sources(count()), targets(count());
    for (size_t i = 0; i < count(); ++i) {
      const Item item{steps.name, i};
      const TensorView view(steps.source[i]);
      check_one_element(item, view);
      check_dtype(op_, item, view, Format::float32);
      sources[i] = view.data;
      targets[i] = add_updated(item, view, steps.target, bytes_of(Format::float32));
    }
    return {Addresses(std::move(sources)), Addresses(std::move(targets))};
  }

  // A number on the device, or the constant if the tensor is absent.
  Scalar scalar(const char* name, const OptionalTensor& tensor, double constant) {
    if (!tensor.has_value()) return {.constant = constant};
    const TensorView view(tensor->get());
    check_one_element({name}, view);
    if (view.dtype == aoti_torch_dtype_float64()) {
      memory_.add({name}, view, sizeof(double), Use::read);
      return {.double_address = reinterpret_cast<const double*>(view.data)};
    }
    check(view.dtype == aoti_torch_dtype_float32(), op_, ": ", name, " is ", DtypeCode{view.dtype},
          ", expected float32 or float64");
    memory_.add({name}, view, sizeof(float), Use::read);
    return {.float_address = reinterpret_cast<const float*>(view.data)};
  }

  // A float32 on the device for each parameter.
  const float* factors(const char* name, AtenTensorHandle tensor) {
    const TensorView view(tensor);
    check_device(op_, {name}, view, device_);
    check_dtype(op_, {name}, view, Format::float32);
    check_flat(op_, {name}, view);
    check_length(op_, {name}, size_t(view.numel), count());
    memory_.add({name}, view, sizeof(float), Use::read);
    return reinterpret_cast<const float*>(view.data);
  }

  void check_none(const Updated& updated) const {
    check_length(op_, {updated.name}, updated.source.size(), 0);
    check_target_length(updated);
  }

  // Nothing that the op writes shares memory with anything else. Call it when all state was given.
  void check_separate() { memory_.check_separate(); }

 private:
  void check_param(size_t i, const TensorView& param, const TensorList* targets) {
    check_device(op_, {"params", i}, param, device_);
    check_dtype(op_, {"params", i}, param, param_dtype_);
    check_dense(op_, {"params", i}, param);
    add_updated({"params", i}, param, targets, bytes_of(param_dtype_));
  }

  void check_grad(size_t i, const TensorView& grad, const TensorView& param) {
    check_device(op_, {"grads", i}, grad, device_);
    check_dtype(op_, {"grads", i}, grad, grad_dtype_);
    check_shape(op_, {"grads", i}, grad, param);
    if (grad.same_layout(param)) {
      memory_.add({"grads", i}, grad, bytes_of(grad_dtype_), Use::read);
    } else {
      grad_addresses_[i] = copy_to_layout({"grads", i}, grad, param);
    }
  }

  // Kernels read all tensors of a parameter in one order. A gradient that lies in another one
  // (a transposed parameter often gets a contiguous gradient) is copied into that of the parameter.
  char* copy_to_layout(const Item& item, const TensorView& grad, const TensorView& param) {
    check_memory(op_, item, grad);
    relaid_grads_.push_back(new_strided_tensor(param.sizes, param.strides, param.dim, grad.dtype,
                                               grad.device_type, grad.device_index));
    const AtenTensorHandle copy = relaid_grads_.back().get();
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

  static Item target_of(const Item& item) { return {item.argument, item.index, "out_"}; }

  void check_target_length(const Updated& updated) const {
    if (updated.target == nullptr) return;
    check_length(op_, target_of({updated.name}), updated.target->size(), updated.source.size());
  }

  // Notes the memory of a tensor that is updated and returns where it is written.
  char* add_updated(const Item& item, const TensorView& source, const TensorList* targets,
                    int64_t element_bytes) {
    if (targets == nullptr) {
      memory_.add(item, source, element_bytes, Use::write);
      return source.data;
    }
    const Item target_item = target_of(item);
    const TensorView target((*targets)[item.index]);
    check_device(op_, target_item, target, device_);
    check(target.dtype == source.dtype, op_, ": ", target_item, " is ", DtypeCode{target.dtype},
          ", expected ", DtypeCode{source.dtype});
    check_shape(op_, target_item, target, source);
    check_layout(op_, target_item, target, source);
    add_target(item, source, target, element_bytes);
    return target.data;
  }

  // What is written is the memory of what is read, or apart from it.
  void add_target(const Item& item, const TensorView& source, const TensorView& target,
                  int64_t element_bytes) {
    if (target.data == source.data) {
      const bool longer = target.numel > source.numel;  // a slab may be
      memory_.add(item, longer ? target : source, element_bytes, Use::write);
    } else {
      memory_.add(item, source, element_bytes, Use::read);
      memory_.add(target_of(item), target, element_bytes, Use::write);
    }
  }

  // `places` are offsets or slots; the slab holds at least `elements`.
  UpdatedAddresses slab(const Updated& updated, Format format, const Integers64& places,
                        int64_t elements) {
    check_length(op_, {updated.name}, updated.source.size(), 1);
    check_target_length(updated);
    const auto [source, target] = add_slab(updated, 0, format, elements);
    return {Addresses(source, places.values, bytes_of(format)),
            Addresses(target, places.values, bytes_of(format))};
  }

  // Returns where the slab of this index is read and where it is written.
  std::pair<char*, char*> add_slab(const Updated& updated, size_t index, Format format,
                                   int64_t elements) {
    const Item item{updated.name, index};
    const TensorView source(updated.source[index]);
    check_slab(item, source, format, elements);
    if (updated.target == nullptr) {
      memory_.add(item, source, bytes_of(format), Use::write);
      return {source.data, source.data};
    }
    const TensorView target((*updated.target)[index]);
    check_slab(target_of(item), target, format, elements);
    add_target(item, source, target, bytes_of(format));
    return {source.data, target.data};
  }

  void check_slab(const Item& item, const TensorView& view, Format format, int64_t elements) {
    check_device(op_, item, view, device_);
    check_dtype(op_, item, view, format);
    check_flat(op_, item, view);
    check(view.numel >= elements, op_, ": ", item, " has ", view.numel,
          " elements, expected at least ", elements);
  }

  static int64_t scales_of(int64_t elements) { return ceil_div(elements, kCodesBlock); }

  const char* op_;
  const TensorList& params_;
  const Integers64 offsets_;
  const Integers64 slots_;
  const TensorView device_;  // any tensor of the device that all must be on: the first parameter
  std::vector<char*> param_addresses_;
  std::vector<char*> param_targets_;
  std::vector<char*> grad_addresses_;
  std::vector<int64_t> numels_;
  int64_t offsets_end_ = 0;  // elements that slabs must have
  int64_t slots_end_ = 0;    // and the slab of step counts
  std::vector<torch::stable::Tensor> relaid_grads_;
  MemoryRanges memory_;
  Dtype param_dtype_;
  Dtype grad_dtype_{};
};

}  // namespace dsx
