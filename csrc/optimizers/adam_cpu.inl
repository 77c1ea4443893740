// The Adam loop over elements [begin, end) of one tensor; compiled once per ISA.
#include "optimizers/adam_math.inl"

template <class Param, class Grad, class Moment>
void adam_loop(const AdamCall& call, const AdamTensor& tensor, const AdamStep& step_of_call,
               int64_t begin, int64_t end) {
  // Local copies, which no store below can change: they stay in registers.
  const AdamStep step = step_of_call;
  const auto param_begin = Pointer<Param>::to(tensor.param, call.param);
  const auto grad_begin = Pointer<Grad>::to(tensor.grad, call.grad);
  const auto exp_avg_begin = Pointer<Moment>::to(tensor.exp_avg, call.moment);
  const auto exp_avg_sq_begin = Pointer<Moment>::to(tensor.exp_avg_sq, call.moment);
  const auto max_exp_avg_sq_begin = Pointer<Moment>::to(tensor.max_exp_avg_sq, call.moment);
  const auto param_copy_begin = Pointer<Any>::to(tensor.param_copy, call.param_copy);
  const bool amsgrad = bool(max_exp_avg_sq_begin);
  const bool copies = bool(param_copy_begin);

  for_each_vector(begin, end, [&](int64_t i, int count) {
    if (i + kPrefetchElements < end) {
      prefetch(grad_begin + i);
      prefetch(param_begin + i);
      prefetch(exp_avg_begin + i);
      prefetch(exp_avg_sq_begin + i);
    }
    const Vec grad = Vec::load(grad_begin + i, count);
    Vec param = Vec::load(param_begin + i, count);
    Vec exp_avg = Vec::load(exp_avg_begin + i, count);
    Vec exp_avg_sq = Vec::load(exp_avg_sq_begin + i, count);
    if (amsgrad) {
      Vec max_exp_avg_sq = Vec::load(max_exp_avg_sq_begin + i, count);
      adam_update(step, grad, param, exp_avg, exp_avg_sq, &max_exp_avg_sq);
      max_exp_avg_sq.store(max_exp_avg_sq_begin + i, count);
    } else {
      adam_update<Vec>(step, grad, param, exp_avg, exp_avg_sq, nullptr);
    }
    param.store(param_begin + i, count);
    exp_avg.store(exp_avg_begin + i, count);
    exp_avg_sq.store(exp_avg_sq_begin + i, count);
    if (copies) param.store(param_copy_begin + i, count);
  });
}

inline void adam(const AdamCall& call, const AdamTensor& tensor, const AdamStep& step,
                 int64_t begin, int64_t end) {
#define DSX_TRY_TYPES(Param, Grad, Moment)                                                \
  if (holds<Param>(call.param) && holds<Grad>(call.grad) && holds<Moment>(call.moment)) { \
    return adam_loop<Param, Grad, Moment>(call, tensor, step, begin, end);                \
  }
  DSX_ADAM_STORAGE_TYPES(DSX_TRY_TYPES)
#undef DSX_TRY_TYPES
}
