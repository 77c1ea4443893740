// The torch side of token_gather and token_scatter, for the device that this is compiled for. The
// schemas are in deepspeed_ext/ops/random_ltd.
#include "random_ltd/tokens.h"

#include <vector>

#include "common/torch/arguments.h"
#include "common/torch/rows.h"
#include "random_ltd/ids_ops.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

// A tensor (samples, tokens, n), or (tokens, samples, n), as rows; a copy of it if its rows do not
// lie in one piece each. This object keeps the copy.
struct TokenTensor {
  TensorView view;
  int64_t samples, tokens, bytes;
  TokenRows rows;

  TokenTensor(const char* op, const Item& item, const Tensor& tensor, bool batch_first, Use use)
      : view(tensor.get()), kept_(tensor) {
    check(view.dim == 3, op, ": ", item, " has shape ", Integers{view.sizes, view.dim},
          ", expected three dimensions");
    check_memory(op, item, view);
    if (view.numel > 0 && view.sizes[2] > 1 && view.strides[2] != 1) {
      check(use == Use::read, op, ": ", item, " has strides ", Integers{view.strides, view.dim},
            ", expected 1 as the last of them");
      kept_ = contiguous_copy(view);
      view = TensorView(kept_.get());
    }
    const int64_t element = int64_t(aoti_torch_dtype_element_size(view.dtype));
    const int sample = batch_first ? 0 : 1;
    samples = view.sizes[sample];
    tokens = checked_tokens(op, item, view.sizes[1 - sample]);
    bytes = view.sizes[2] * element;
    rows = {view.data, view.strides[sample] * element, view.strides[1 - sample] * element};
  }

 private:
  Tensor kept_;
};

Tensor new_tokens(const TensorView& beside, int64_t samples, int64_t tokens, bool batch_first) {
  const int64_t sizes[] = {batch_first ? samples : tokens, batch_first ? tokens : samples,
                           beside.sizes[2]};
  return new_tensor(sizes, 3, beside.dtype, beside);
}

// The ids that go with a tensor of tokens.
struct IdReader {
  const char* op;
  WholeNumbers ids;
  KeptTokens tokens;

  IdReader(const char* name, const Tensor& tensor, const TensorView& beside, int64_t samples,
           int64_t count)
      : op(name), ids(op, {"ids"}, tensor, aoti_torch_dtype_int32(), beside) {
    const TensorView& view = ids.view;
    check(view.dim == 2 && view.sizes[0] == samples, op, ": ids has shape ",
          Integers{view.sizes, view.dim}, ", expected two dimensions, the first of ", samples,
          ", the samples");
    checked_tokens(op, {"the second dimension of ids"}, view.sizes[1]);
    tokens = {samples, count, view.sizes[1], ids.numbers<int32_t>()};
    check_ids(op, tokens.ids, samples * tokens.kept, count);
  }

  // The rows of the ids are of this shape and type.
  void check_part(const Item& item, const TokenTensor& part, const TensorView& like,
                  bool batch_first) const {
    check_device(op, item, part.view, like);
    check(part.view.dtype == like.dtype, op, ": ", item, " is ", DtypeCode{part.view.dtype},
          ", expected ", DtypeCode{like.dtype});
    const int64_t want[] = {batch_first ? tokens.samples : tokens.kept,
                            batch_first ? tokens.kept : tokens.samples, like.sizes[2]};
    bool same = true;
    for (int i = 0; i < 3; ++i) same = same && part.view.sizes[i] == want[i];
    check(same, op, ": ", item, " has shape ", Integers{part.view.sizes, 3}, ", expected ",
          Integers{want, 3}, " beside those ids");
  }
};

#ifndef USE_CUDA
constexpr int64_t kBytesPerThread = 128 << 10;  // some 5 us: less is not worth a thread

// Which ids name each token.
struct Named {
  std::vector<int32_t> first, next;

  Named(const char* op, const KeptTokens& tokens, bool several)
      : first(size_t(tokens.samples * tokens.tokens), -1),
        next(size_t(tokens.samples * tokens.kept), -1) {
    for (int64_t sample = 0; sample < tokens.samples; ++sample) {
      for (int64_t i = tokens.kept - 1; i >= 0; --i) {
        const int64_t id = sample * tokens.kept + i;
        int32_t& named_by = first[size_t(sample * tokens.tokens + tokens.ids[id])];
        check(several || named_by < 0, op, ": ids has ", tokens.ids[id], " as its element number ",
              sample * tokens.kept + named_by,
              ", expected a token that no other id of the sample is");
        next[size_t(id)] = named_by;
        named_by = int32_t(i);
      }
    }
  }
};
#endif

void run(const char* op, const MoveTokens& call, int device) {
  if (call.bytes == 0) return;
#ifdef USE_CUDA
  const OnDevice on(device);
  move_tokens_cuda(op, call, on.stream);
#else
  if (call.to_all) Named(op, call.tokens, false);
  in_parallel(call.tokens.samples * call.tokens.kept, call.bytes, kBytesPerThread,
              [&](Isa isa, int64_t begin, int64_t end) { move_tokens_cpu(isa, call, begin, end); });
#endif
}

void run(const char* op, MergeTokens& call, int device) {
#ifdef USE_CUDA
  const OnDevice on(device);
  merge_tokens_cuda(op, call, on.stream);
#else
  const Named named(op, call.tokens, call.adds);
  if (call.bytes == 0) return;
  call.first = named.first.data();
  call.next = named.next.data();
  in_parallel(
      call.tokens.samples * call.tokens.tokens, call.bytes, kBytesPerThread,
      [&](Isa isa, int64_t begin, int64_t end) { merge_tokens_cpu(isa, call, begin, end); });
#endif
}

Tensor token_gather(const Tensor& x, const Tensor& ids, bool batch_first) {
  constexpr const char* op = "token_gather";
  const TokenTensor all(op, {"x"}, x, batch_first, Use::read);
  const IdReader reader(op, ids, all.view, all.samples, all.tokens);
  Tensor made = new_tokens(all.view, all.samples, reader.tokens.kept, batch_first);
  const TokenTensor part(op, {"out"}, made, batch_first, Use::write);
  run(op, MoveTokens{reader.tokens, all.bytes, all.rows, part.rows, false}, all.view.device_index);
  return made;
}

void token_scatter_(const Tensor& all_tokens, const Tensor& part, const Tensor& ids,
                    bool batch_first) {
  constexpr const char* op = "token_scatter_";
  const TokenTensor all(op, {"all_tokens"}, all_tokens, batch_first, Use::write);
  const IdReader reader(op, ids, all.view, all.samples, all.tokens);
  const TokenTensor of_part(op, {"part"}, part, batch_first, Use::read);
  reader.check_part({"part"}, of_part, all.view, batch_first);
  check_no_overlap(op, {"all_tokens"}, all.view);
  SeparateTensors separate(op, 3);
  separate.add({"all_tokens"}, all.view, Use::write);
  separate.add({"part"}, TensorView(part.get()), Use::read);
  separate.add({"ids"}, reader.ids.view, Use::read);
  run(op, MoveTokens{reader.tokens, all.bytes, all.rows, of_part.rows, true},
      all.view.device_index);
}

Tensor token_scatter(const Tensor& all_tokens, const OptionalTensor& part, const Tensor& ids,
                     bool batch_first) {
  constexpr const char* op = "token_scatter";
  const TokenTensor all(op, {"all_tokens"}, all_tokens, batch_first, Use::read);
  const IdReader reader(op, ids, all.view, all.samples, all.tokens);
  MergeTokens call = {};
  call.tokens = reader.tokens;
  call.bytes = all.bytes;
  call.all = all.rows;
  std::optional<TokenTensor> of_part;
  if (part.has_value()) {
    of_part.emplace(op, Item{"part"}, *part, batch_first, Use::read);
    reader.check_part({"part"}, *of_part, all.view, batch_first);
    call.part = of_part->rows;
  }
  Tensor made = new_tokens(all.view, all.samples, all.tokens, batch_first);
  call.out = TokenTensor(op, {"out"}, made, batch_first, Use::write).rows;
  run(op, call, all.view.device_index);
  return made;
}

Number number_of(const char* op, const Item& item, const TensorView& view) {
  if (view.dtype == aoti_torch_dtype_float64()) return Number::float64;
  constexpr Number kNumbers[] = {Number::float32, Number::bfloat16, Number::float16};
  for (Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16}) {
    if (view.dtype == torch_code(dtype)) return kNumbers[int(dtype)];
  }
  check(false, op, ": ", item, " is ", DtypeCode{view.dtype},
        ", expected float32, bfloat16, float16 or float64");
  return {};
}

Tensor token_gather_backward(const Tensor& grad, const Tensor& ids, int64_t tokens,
                             bool batch_first) {
  constexpr const char* op = "token_gather_backward";
  const TokenTensor part(op, {"grad"}, grad, batch_first, Use::read);
  checked_tokens(op, {"tokens"}, tokens);
  const IdReader reader(op, ids, part.view, part.samples, tokens);
  reader.check_part({"grad"}, part, part.view, batch_first);
  MergeTokens call = {};
  call.tokens = reader.tokens;
  call.bytes = part.bytes;
  call.part = part.rows;
  call.adds = true;
  call.number = number_of(op, {"grad"}, part.view);
  Tensor made = new_tokens(part.view, part.samples, tokens, batch_first);
  call.out = TokenTensor(op, {"out"}, made, batch_first, Use::write).rows;
  run(op, call, part.view.device_index);
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("token_gather", &boxed<&token_gather>);
  library.impl("token_gather_backward", &boxed<&token_gather_backward>);
  library.impl("token_scatter", &boxed<&token_scatter>);
  library.impl("token_scatter_", &boxed<&token_scatter_>);
}

}  // namespace dsx
