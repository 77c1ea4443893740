// The torch side of repack_weight_, for the device that this is compiled for. The schema is in
// deepspeed_ext/ops/quantization/.
#include <algorithm>
#include <vector>

#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "quantization/groups_ops.h"
#include "quantization/repack.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

constexpr const char* kOp = "repack_weight_";

void check_sizes(const Item& item, const TensorView& view, int64_t first, int64_t second) {
  const int64_t want[] = {first, second};
  check(view.dim == 2 && view.sizes[0] == first && view.sizes[1] == second, kOp, ": ", item,
        " has shape ", Integers{view.sizes, view.dim}, ", expected ", Integers{want, 2});
}

void check_contiguous(const Item& item, const TensorView& view) {
  check(view.is_contiguous(), kOp, ": ", item, " has strides ", Integers{view.strides, view.dim},
        " for shape ", Integers{view.sizes, view.dim}, ", expected a contiguous tensor");
}

void check_dtype_of(const Item& item, const TensorView& view, int32_t want, const char* name) {
  check(view.dtype == want, kOp, ": ", item, " is ", DtypeCode{view.dtype}, ", expected ", name);
}

void read_words(const TensorView& words, Repack& call) {
  check_dtype_of({"words"}, words, aoti_torch_dtype_int32(), "int32");
  check(!call.across || call.rows % kAcross == 0, kOp, ": codes has ", call.rows,
        " rows, expected a multiple of ", kAcross, ", as many as share a word");
  check_sizes({"words"}, words, call.lanes(), call.steps());
  call.words = reinterpret_cast<const uint32_t*>(words.data);
  call.lane_pitch = words.strides[0];
  call.step_pitch = words.strides[1];
}

void read_order(const TensorView& order, Repack& call) {
  check_dtype_of({"order"}, order, aoti_torch_dtype_int64(), "int64");
  check(order.dim == 1 && order.sizes[0] == call.length, kOp, ": order has shape ",
        Integers{order.sizes, order.dim}, ", expected [", call.length, "]");
  check_contiguous({"order"}, order);
  call.order = reinterpret_cast<const int64_t*>(order.data);
}

#ifdef USE_CUDA
void check_order(const Repack& /*call*/) {}  // no value is known here

void run(const Repack& call, const TensorView& words) {
  const OnDevice on(words.device_index);
  repack_cuda(call, on.stream);
}
#else
void check_order(const Repack& call) {
  std::vector<bool> seen(size_t(call.length), false);
  for (int64_t i = 0; i < call.length; ++i) {
    const int64_t number = call.order[i];
    check(number >= 0 && number < call.length && !seen[size_t(number)], kOp, ": order[", i, "] is ",
          number, ", expected each of 0 to ", call.length - 1, " once");
    seen[size_t(number)] = true;
  }
}

constexpr int64_t kBytesPerThread = 1 << 20;  // some ms; who has less may be one of many threads

void run(const Repack& call, const TensorView& words) {
  const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
  const int64_t blocks = ceil_div(call.lanes(), kRepackLanes);
  const int64_t worth = ceil_div(call.rows * call.row_bytes, kBytesPerThread);
  const int64_t threads = int64_t(torch::stable::get_num_threads());
  const int64_t parts = std::max<int64_t>(1, std::min({blocks, worth, threads}));
  const int64_t of_part = repack_scratch_bytes(call), sizes[] = {parts, of_part};
  const Tensor scratch = new_tensor(sizes, 2, aoti_torch_dtype_uint8(), words);
  uint8_t* memory = reinterpret_cast<uint8_t*>(address_of(scratch.get()));
  torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      repack_cpu(isa, call, memory + i * of_part, blocks * i / parts, blocks * (i + 1) / parts);
    }
  });
}
#endif

void repack_weight_(const Tensor& words, const OptionalTensor& order, const Tensor& codes,
                    int64_t format, int64_t length, bool biased, bool across) {
  check(format >= 0 && format <= int64_t(QuantFormat::nf4), kOp, ": format is ", format,
        ", expected 0, 1 or 2, which are int8, int4 and nf4");
  check(length >= 0 && length <= INT32_MAX, kOp, ": length is ", length, ", expected 0 to ",
        INT32_MAX);
  check(!across || QuantFormat(format) != QuantFormat::int8, kOp,
        ": across is True, expected False, as only words of 4 bits are across rows");
  const TensorView source(words.get()), target(codes.get());
  check_device(kOp, {"codes"}, target, source);
  check_dtype_of({"codes"}, target, aoti_torch_dtype_uint8(), "uint8");
  Repack call = {};
  call.format = QuantFormat(format);
  call.biased = biased;
  call.across = across;
  call.length = length;
  call.rows = target.dim > 0 ? target.sizes[0] : 0;
  call.row_bytes = ceil_div(length * call.bits(), 8 * kPackedLineBytes) * kPackedLineBytes;
  check_sizes({"codes"}, target, call.rows, call.row_bytes);
  check_contiguous({"codes"}, target);
  check(call.rows <= INT32_MAX, kOp, ": codes has ", call.rows, " rows, expected at most ",
        INT32_MAX);
  call.codes = reinterpret_cast<uint8_t*>(target.data);
  read_words(source, call);
  SeparateTensors tensors(kOp, 3);
  tensors.add({"words"}, source, Use::read);
  if (order.has_value()) {
    const TensorView view(order->get());
    check_device(kOp, {"order"}, view, source);
    read_order(view, call);
    tensors.add({"order"}, view, Use::read);
    check_order(call);
  }
  tensors.add({"codes"}, target, Use::write);
  if (target.numel > 0) run(call, source);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("repack_weight_", &boxed<&repack_weight_>);
}

}  // namespace dsx
