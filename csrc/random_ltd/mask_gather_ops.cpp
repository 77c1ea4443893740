// The torch side of mask_gather_bert, for the device that this is compiled for. The schema is in
// deepspeed_ext/ops/random_ltd/mask_gather.py.
#include "common/torch/arguments.h"
#include "random_ltd/ids_ops.h"
#include "random_ltd/mask_gather.h"

namespace dsx {
namespace {

using torch::stable::Tensor;
constexpr const char* kOp = "mask_gather_bert";

void run(const MaskGather& call, int device) {
#ifdef USE_CUDA
  const OnDevice on(device);
  mask_gather_cuda(call, on.stream);
#else
  (void)device;
  constexpr int64_t kElementsPerThread = 8192;  // some 5 us: less is not worth a thread
  in_parallel(call.rows(), call.kept, kElementsPerThread,
              [&](Isa, int64_t begin, int64_t end) { mask_gather_cpu(call, begin, end); });
#endif
}

void check_mask(const TensorView& mask) {
  check(mask.dim == 4 && (mask.sizes[2] == mask.sizes[3] || mask.sizes[2] == 1), kOp,
        ": mask has shape ", Integers{mask.sizes, mask.dim},
        ", expected [samples, heads, tokens, tokens], or 1 in place of the first tokens");
  check_memory(kOp, {"mask"}, mask);
}

Tensor mask_gather_bert(const Tensor& mask, const Tensor& ids) {
  const TensorView view(mask.get());
  check_mask(view);
  const WholeNumbers numbers(kOp, {"ids"}, ids, aoti_torch_dtype_int32(), view);
  const TensorView& of_ids = numbers.view;
  check(of_ids.dim == 3 && of_ids.sizes[1] == view.sizes[0], kOp, ": ids has shape ",
        Integers{of_ids.sizes, of_ids.dim}, ", expected [layers, ", view.sizes[0], ", kept]");
  const int64_t tokens = view.sizes[3], kept = of_ids.sizes[2];
  const bool one_query = view.sizes[2] == 1 && tokens != 1;
  const int64_t element = int64_t(aoti_torch_dtype_element_size(view.dtype));
  const int64_t sizes[] = {of_ids.sizes[0], view.sizes[0], view.sizes[1], one_query ? 1 : kept,
                           kept};
  Tensor out = new_tensor(sizes, 5, view.dtype, view);
  MaskGather call = {};
  call.layers = sizes[0];
  call.samples = sizes[1];
  call.heads = sizes[2];
  call.queries = sizes[3];
  call.tokens = tokens;
  call.kept = kept;
  call.bytes = element;
  call.ids = numbers.numbers<int32_t>();
  call.mask = view.data;
  call.of_sample = view.strides[0] * element;
  call.of_head = view.strides[1] * element;
  call.of_query = one_query ? 0 : view.strides[2] * element;
  call.of_token = view.strides[3] * element;
  call.out = static_cast<char*>(out.data_ptr());
  check_ids(kOp, call.ids, of_ids.numel, tokens);
  if (call.rows() > 0 && kept > 0) run(call, view.device_index);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("mask_gather_bert", &boxed<&mask_gather_bert>);
}

}  // namespace dsx
