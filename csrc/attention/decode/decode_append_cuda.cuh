// What rope_append_ does, in the kernel that attends: the warps that multiply make rows of queries,
// and those of one block the new key and value, which go to the cache and beside it.
#pragma once

#include "attention/decode/decode_page_cuda.cuh"
#include "attention/cache/rope_append_head_cuda.cuh"

namespace dsx::cuda {

// A warp asks for bytes to be brought into the L2 cache; see chain.cuh for when it may.
__device__ inline void ask_for_bytes(const void* begin, int64_t bytes) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSector = 32;
#pragma unroll 1
  for (int64_t i = threadIdx.x % 32 * kSector; i < bytes; i += 32 * kSector) {
    asm volatile("prefetch.L2 [%0];" ::"l"(static_cast<const char*>(begin) + i));
  }
#else
  (void)begin, (void)bytes;
#endif
}

// Where the new token of a head of keys belongs.
struct AppendTarget {
  bool here;  // it is this block that has the last chunk
  int page;   // -1: there is no such page
  int position;
};

// Heads of q come first, then that of k, then that of v; each warp has every so many of them.
template <class Q, class Kind, int kWidth>
class Append {
  static constexpr int kEach = kWidth / 32;
  static constexpr int kOfWarp = (kTileRows + 2 + kPageWarps - 1) / kPageWarps;
  using NewToken = cuda::NewToken<kWidth>;

 public:
  // `floats` is memory for all heads.
  __device__ Append(const RopeAppend& call, int group, float* floats, NewToken& token)
      : call_(call), group_(group), width_(int(call.kv.width)), floats_(floats), token_(token) {}

  // A warp asks for what is the same for every token.
  __device__ static void ask_ahead(const RopeAppend& call) {
    ask_for_bytes(call.frequencies.data, call.pairs * (call.frequencies.is_double ? 8 : 4));
    for (const HeadWeight* weight : {&call.q_weight, &call.k_weight}) {
      if (weight->is_present()) {
        ask_for_bytes(weight->data, call.kv.width * bytes_of(weight->dtype));
      }
    }
  }

  __device__ void run(int batch, int head, Barrier* begun, const AppendTarget& target) {
    // All of this is on its way at the same time.
    HeadRotation<kEach> rotation(call_);
    Q read[kOfWarp][kEach];
    begin_to_read(batch, head, read);
    float of_q[kEach] = {}, of_k[kEach] = {};
    read_weights(call_.q_weight, of_q);
    read_weights(call_.k_weight, of_k);
    keep(read);
    wait_for(begun, 0);
    rotation.move_to(uint64_t(target.position));
    const int heads = group_ + (target.here ? 2 : 0);
#pragma unroll 1  // instructions are read from memory, too
    for (int number = warp_; number < heads; number += kPageWarps) {
      float* const near = floats_ + number * kWidth;
      float elements[kEach];
      for_each_element<kEach>([&](int i, int element) { elements[i] = near[element]; });
      const bool is_q = number < group_, is_v = number == group_ + 1;
      if (!is_v && (is_q ? call_.q_weight : call_.k_weight).is_present()) {
        float weights[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) weights[i] = is_q ? of_q[i] : of_k[i];
        normalise(call_, weights, elements);
      }
      if (!is_v && call_.pairs > 0) rotate(rotation, near, elements);
      if (is_q) {
        Q* const row = reinterpret_cast<Q*>(token_.queries[number]);
        for_each_element<kEach>([&](int i, int element) {
          row[element] = narrow<Q>(element < width_ ? elements[i] : 0.0f);
        });
      } else {
        append(is_v, head, target, elements);
      }
    }
  }

 private:
  __device__ void begin_to_read(int batch, int head, Q (&read)[kOfWarp][kEach]) const {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      const int number = warp_ + i * kPageWarps;
      const int of_q = head * group_ + ::min(number, group_ - 1);
      const Q* const source = (number < group_    ? call_.q.at<Q>(batch, 0, of_q)
                               : number == group_ ? call_.k.at<Q>(batch, 0, head)
                                                  : call_.v.at<Q>(batch, 0, head))
                                  .address;
      const int width = number < group_ + 2 ? width_ : 0;
      for_each_element<kEach>(
          [&](int k, int element) { read[i][k] = element < width ? source[element] : Q{}; });
    }
  }
  // As floats, in shared memory.
  __device__ void keep(const Q (&read)[kOfWarp][kEach]) const {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      const int number = warp_ + i * kPageWarps;
      if (number >= group_ + 2) continue;
      for_each_element<kEach>(
          [&](int k, int element) { floats_[number * kWidth + element] = widen(read[i][k]); });
    }
  }

  __device__ void read_weights(const HeadWeight& weight, float (&elements)[kEach]) const {
    if (!weight.is_present()) return;
    read_elements(Pointer<Any>::to(weight.data, weight.dtype), width_, elements);
  }

  // Writes the key or the value to the cache, if it has a page there, and beside it.
  __device__ void append(bool is_v, int head, const AppendTarget& target,
                         const float (&elements)[kEach]) const {
    using T = std::conditional_t<Kind::kQuantized, uint8_t, Q>;
    const PagedKv& kv = call_.kv;
    const StoredHead<Kind, T, kEach> stored(elements, width_);
    T* const near = reinterpret_cast<T*>(is_v ? token_.values : token_.keys);
    for_each_element<kEach>(
        [&](int i, int element) { near[element] = element < width_ ? stored.elements[i] : T{}; });
    const int64_t token = target.position % kPageTokens;
    T* const all = static_cast<T*>(is_v ? kv.values : kv.keys);
    if (target.page >= 0) stored.write(all + kv.place(target.page, head, token), width_);
    if constexpr (Kind::kQuantized) {
      if (threadIdx.x % 32 != 0) return;
      (is_v ? token_.value_scale : token_.key_scale) = stored.scale;
      float* const scales = is_v ? kv.value_scales : kv.key_scales;
      if (target.page >= 0) scales[kv.scale_place(target.page, head, token)] = stored.scale;
    }
  }

  const RopeAppend& call_;
  const int group_, width_, warp_ = threadIdx.x / 32;
  float* const floats_;
  NewToken& token_;
};

}  // namespace dsx::cuda
