// The two answers that every driver gives to a call that it does not even try.
#pragma once

#include "base/status.h"

namespace vmm {

// `why` says what is wrong with what was asked: a literal.
inline Status refuse(const char* why) { return {StatusCode::invalid_argument, why}; }
// The driver ended (driver.h: alive()).
inline Status gone(const char* call) { return {StatusCode::driver_gone, call}; }

}  // namespace vmm
