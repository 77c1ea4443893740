// The arguments of an op as torch hands them over, and the registration of a function that takes
// them. TORCH_BOX would make a std::vector of shared pointers of a list of tensors; the handles
// that the list holds anyway are a sixth cheaper, which shows in a step over thousands of small
// tensors.
#pragma once

#include <torch/csrc/stable/library.h>

#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/torch/tensor_view.h"

namespace dsx {

class TensorList {
 public:
  TensorList() = default;

  // Takes over the handles of a list of tensors, and the list.
  explicit TensorList(StableListHandle list) {
    size_t count = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_size(list, &count));
    handles_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      StableIValue item = 0;
      TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
      handles_[i] = torch::stable::detail::to<AtenTensorHandle>(item);
    }
    TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
  }

  TensorList(TensorList&& other) noexcept : handles_(std::exchange(other.handles_, {})) {}
  TensorList& operator=(TensorList&& other) noexcept {
    std::swap(handles_, other.handles_);
    return *this;
  }
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;

  ~TensorList() {
    for (AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
  }

  size_t size() const { return handles_.size(); }
  bool empty() const { return handles_.empty(); }
  AtenTensorHandle operator[](size_t i) const { return handles_[i]; }

  // The addresses of all tensors, asked for in a loop that does nothing else: the questions that
  // follow for each tensor then find it in the cache. Getting there costs several cache misses,
  // which overlap only between the iterations of a short loop.
  std::vector<char*> addresses() const {
    std::vector<char*> addresses(size());
    for (size_t i = 0; i < size(); ++i) addresses[i] = address_of(handles_[i]);
    return addresses;
  }

 private:
  std::vector<AtenTensorHandle> handles_;
};

// A value of the stack as the type that the op's function takes.
template <class T>
T unbox(StableIValue value) {
  if constexpr (std::is_same_v<T, TensorList>) {
    return TensorList(torch::stable::detail::to<StableListHandle>(value));
  } else {
    return torch::stable::detail::to<T>(value);
  }
}

// Puts results where the arguments were; torch has made the stack long enough for either.
template <class Result>
void box(Result&& result, StableIValue* stack) {
  stack[0] = torch::stable::detail::from(std::forward<Result>(result));
}

template <class... Results>
void box(std::tuple<Results...>&& results, StableIValue* stack) {
  std::apply([&](auto&... each) { ((*stack++ = torch::stable::detail::from(each)), ...); },
             results);
}

template <class Result, class... Arguments, size_t... indices>
void call_unboxed(Result (*function)(Arguments...), StableIValue* stack,
                  std::index_sequence<indices...>) {
  // Braces take the values over in order, and all of them: each owns what it stands for.
  std::tuple<std::remove_cvref_t<Arguments>...> values{
      unbox<std::remove_cvref_t<Arguments>>(stack[indices])...};
  if constexpr (std::is_void_v<Result>) {
    function(std::get<indices>(values)...);
  } else {
    box(function(std::get<indices>(values)...), stack);
  }
}

template <class Result>
constexpr size_t kResults = 1;
template <>
inline constexpr size_t kResults<void> = 0;
template <class... Results>
inline constexpr size_t kResults<std::tuple<Results...>> = sizeof...(Results);

template <class Result, class... Arguments>
constexpr size_t count_of(Result (*)(Arguments...)) {
  return sizeof...(Arguments);
}
template <class Result, class... Arguments>
constexpr size_t results_of(Result (*)(Arguments...)) {
  return kResults<Result>;
}

// What torch calls for an op that returns what the function does, nothing, a tensor or a tuple of
// them; keyword-only arguments are the last ones: library.impl(name, &boxed<&function>).
template <auto function>
void boxed(StableIValue* stack, uint64_t arguments, uint64_t results) {
  constexpr size_t count = count_of(function);
  STD_TORCH_CHECK(arguments == count, "the schema has ", arguments, " arguments, expected ", count);
  STD_TORCH_CHECK(results == results_of(function), "the schema has ", results,
                  " results, expected ", results_of(function));
  call_unboxed(function, stack, std::make_index_sequence<count>());
}

}  // namespace dsx
