// DSX_ASSERT(condition, text): what a kernel owes those that it calls. In builds with DSX_CHECKED,
// as those of tests/csrc under sanitizers are, it aborts with the text if the condition is false;
// in all others it is no code at all.
#pragma once

#ifdef DSX_CHECKED
#include <cassert>
#define DSX_ASSERT(condition, text) assert((condition) && text)
#else
#define DSX_ASSERT(condition, text) static_cast<void>(sizeof(condition))
#endif
