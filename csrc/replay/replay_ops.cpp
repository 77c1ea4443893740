// Registers replay_: calls of ops that were recorded, made again one after the other. The schema is
// in deepspeed_ext/ops/replay.py, which writes the code.
//
// Code is a row of numbers. A place is that of a tensor: from 0 on of those that are given, from -1
// down of those that instructions leave. First the place of the result, then instructions:
//
//   call   0, place of the op's name, counts of arguments and of results,
//          for each argument a Kind and what it is, for each result its place
//   view   1, places of a tensor and of the view, by how many elements it begins later, dimensions,
//          their sizes, their strides
//
// A name is that of an op and that of its overload, each with a zero byte behind it.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "common/torch/arguments.h"
#include "common/torch/checks.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

constexpr const char* kOp = "replay_";

// In the order of deepspeed_ext/ops/replay.py.
enum class Kind : int64_t {
  none,
  tensor,
  optional_tensor,
  integer,
  optional_integer,
  boolean,
  number,
};

class Player {
 public:
  Player(const Tensor& names, const Tensor& code, const TensorList& given)
      : names_(names.get()), code_(code.get()), given_(given) {
    check(names_.dtype == aoti_torch_dtype_uint8() && code_.dtype == aoti_torch_dtype_int64(), kOp,
          ": names and code are ", DtypeCode{names_.dtype}, " and ", DtypeCode{code_.dtype},
          ", expected uint8 and int64");
    check(names_.is_contiguous() && code_.is_contiguous(), kOp,
          ": names and code have gaps, expected contiguous tensors");
    check(names_.numel == 0 || names_.data[names_.numel - 1] == 0, kOp,
          ": names has no zero at its end, expected one behind each name");
  }

  Tensor play() {
    const int64_t result = next();
    while (at_ < code_.numel) {
      const int64_t instruction = next();
      check(instruction == 0 || instruction == 1, kOp, ": code[", at_ - 1, "] is ", instruction,
            ", expected 0 or 1");
      if (instruction == 0) call();
      if (instruction == 1) view();
    }
    return Tensor(shared(result));
  }

 private:
  int64_t next() {
    check(at_ < code_.numel, kOp, ": code has ", code_.numel, " numbers, expected more");
    return reinterpret_cast<const int64_t*>(code_.data)[at_++];
  }

  // As many numbers as the next one says.
  const int64_t* next_row(int64_t count) {
    check(count >= 0 && count <= code_.numel - at_, kOp, ": code has ", code_.numel,
          " numbers, expected more");
    at_ += count;
    return reinterpret_cast<const int64_t*>(code_.data) + (at_ - count);
  }

  AtenTensorHandle at(int64_t place) const {
    const size_t i = size_t(place >= 0 ? place : -1 - place);
    const bool known = place >= 0 ? i < given_.size() : i < left_.size() && left_[i].defined();
    check(known, kOp, ": code has place ", place, ", expected that of a tensor");
    return place >= 0 ? given_[i] : left_[i].get();
  }

  // One more owner of the tensor.
  AtenTensorHandle shared(int64_t place) const {
    AtenTensorHandle made = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(at(place), &made));
    return made;
  }

  void leave(int64_t place, Tensor tensor) {
    const size_t i = size_t(-1 - place);
    check(place < 0 && i <= left_.size(), kOp, ": code has place ", place,
          " for a result, expected the next one below 0");
    if (i == left_.size()) left_.emplace_back();
    left_[i] = std::move(tensor);
  }

  StableIValue argument(Kind kind, int64_t what) const {
    namespace stable = torch::stable::detail;
    switch (kind) {
      case Kind::none: return stable::from(std::nullopt);
      case Kind::tensor: return stable::from(shared(what));
      case Kind::optional_tensor: return stable::from(std::optional<Tensor>(Tensor(shared(what))));
      case Kind::integer: return stable::from(what);
      case Kind::optional_integer: return stable::from(std::optional<int64_t>(what));
      case Kind::boolean: return stable::from(what != 0);
      case Kind::number: return stable::from(std::bit_cast<double>(what));
    }
    check(false, kOp, ": code has an argument of kind ", int64_t(kind), ", expected one of Kind");
    return {};
  }

  void call() {
    const int64_t place = next(), arguments = next(), results = next();
    check(place >= 0 && place < names_.numel, kOp, ": code has name ", place,
          ", expected a place in names");
    const char* const name = names_.data + place;
    const int64_t end = place + int64_t(strlen(name)) + 1;
    check(end < names_.numel, kOp, ": names has no overload behind ", name, ", expected one");
    const int64_t* const given = next_row(2 * arguments);
    const int64_t* const places = next_row(results);
    stack_.assign(size_t(std::max(arguments, results)), 0);
    for (int64_t i = 0; i < arguments; ++i) {
      stack_[size_t(i)] = argument(Kind(given[2 * i]), given[2 * i + 1]);
    }
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher(name, names_.data + end, stack_.data(), TORCH_ABI_VERSION));
    for (int64_t i = 0; i < results; ++i) {
      leave(places[i], torch::stable::detail::to<Tensor>(stack_[size_t(i)]));
    }
  }

  void view() {
    const int64_t source = next(), target = next(), later = next(), dims = next();
    const int64_t* const sizes = next_row(dims);
    const int64_t* const strides = next_row(dims);
    AtenTensorHandle made = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch__reinterpret_tensor(at(source), dims, sizes, strides, later, &made));
    leave(target, Tensor(made));
  }

  const TensorView names_, code_;
  const TensorList& given_;
  int64_t at_ = 0;  // of the next number
  std::vector<Tensor> left_;
  std::vector<StableIValue> stack_;
};

Tensor replay(const Tensor& names, const Tensor& code, const TensorList& given) {
  return Player(names, code, given).play();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) { library.impl("replay_", &boxed<&replay>); }

}  // namespace dsx
