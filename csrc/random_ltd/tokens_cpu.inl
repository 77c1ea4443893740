// The loops over rows of tokens.
#include "common/simd/copy_row.inl"

inline void move_tokens(const MoveTokens& call, int64_t begin, int64_t end) {
  const KeptTokens& tokens = call.tokens;
  const TokenRows& target = call.to_all ? call.all : call.part;
  const bool past_cache = go_past_cache(target, tokens.samples * tokens.kept, call.bytes);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t sample = i / tokens.kept;
    char* const all = call.all.row(sample, tokens.ids[i]);
    char* const part = call.part.row(sample, i % tokens.kept);
    copy_row(call.to_all ? part : all, call.to_all ? all : part, call.bytes, past_cache);
  }
  end_past_cache();
}

inline void merge_tokens(const MergeTokens& call, int64_t begin, int64_t end) {
  const KeptTokens& tokens = call.tokens;
  const bool past_cache = go_past_cache(call.out, tokens.samples * tokens.tokens, call.bytes);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t sample = i / tokens.tokens, token = i % tokens.tokens;
    const int32_t first = call.first[i];
    const TokenRows& from = first >= 0 ? call.part : call.all;
    char* const out = call.out.row(sample, token);
    if (!from.is_present()) {
      memset(out, 0, size_t(call.bytes));
    } else if (first >= 0 && call.adds && call.next[sample * tokens.kept + first] >= 0) {
      add_rows(call, sample, first, out);
    } else {
      copy_row(from.row(sample, first >= 0 ? first : token), out, call.bytes, past_cache);
    }
  }
  end_past_cache();
}
