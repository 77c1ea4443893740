// A new token on CUDA: where it is, where it goes, and which heads it has.
#pragma once

#include "attention/cache/rope_append.h"

namespace dsx {

// Of 32 bits: a launch has no more tokens, and lengths and pages are such numbers.
struct AppendedToken {
  int batch, number;   // in the batch
  int position, page;  // in the slot, once they have been found; page is -1: there is none

  __device__ AppendedToken(const RopeAppend& call, unsigned row)
      : batch(int(quotient(row, call.news.tokens))),
        number(int(row) - batch * int(call.news.tokens)) {}

  // False if there is nothing to be done with it. One thread of all tells of what cannot be.
  __device__ bool find_place(const RopeAppend& call, bool tells) {
    const Sequence sequence = sequence_of(call.kv, call.news, batch);
    if (sequence.wrong && tells) *call.violations = 1;
    if (number >= sequence.count) return false;
    position = int(sequence.position(number));
    page = int(call.kv.page_of(sequence.slot, position / kPageTokens));
    return true;
  }
  // Later, as that is when the page will have been read.
  __device__ void tell_of_page(const RopeAppend& call, bool tells) const {
    if (tells && page < 0) *call.violations = 1;
  }
};

// Which of the heads of a token one is: those of q come first, then those of k, then those of v.
template <class Index>
struct HeadOfToken {
  bool of_q, of_k;
  Index head;

  __device__ HeadOfToken(const RopeAppend& call, Index number)
      : of_q(number < Index(call.q.heads)),
        of_k(!of_q && number < Index(call.q.heads + call.kv.heads)),
        head(number - (of_q   ? 0
                       : of_k ? Index(call.q.heads)
                              : Index(call.q.heads + call.kv.heads))) {}

  // That of q, of k or of v.
  template <class V>
  __device__ const V& choose(const V& q, const V& k, const V& v) const {
    return of_q ? q : of_k ? k : v;
  }
};

}  // namespace dsx
