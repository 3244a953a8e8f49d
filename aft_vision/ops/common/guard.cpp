// The error message that Python reads after a function has failed.

#include "guard.h"

#include <cstdio>

namespace {

thread_local char last_reason[256];

}  // namespace

extern "C" {

int aft_report(int code, const char *reason) noexcept {
  std::snprintf(last_reason, sizeof last_reason, "%s", reason);
  return code;
}

const char *aft_reason() { return last_reason; }

// The order and meaning of what Python packs and of all arguments; raise it here and in `cpp.py` with any change.
int aft_layout() { return 4; }
}
