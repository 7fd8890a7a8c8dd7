// What a thread's c10::ThreadLocalDebugInfo holds for one kind, changed without
// disturbing what others have put there. It knows neither pools nor models.
//
// torch keeps a chain a thread, copied to whatever works on the thread's behalf,
// and lets only the last link be taken off. Its profiler puts a link there when
// it begins and takes it off when it ends, or steps; a link of ours on top of it
// would make that fail ("Expected debug info of type 2"). So ours goes beneath
// all others, and comes out from beneath them. Links are never changed: those
// above ours are made anew, for whoever has copied the chain keeps his own.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace vmm {

// This thread's chain holds `info` for `kind` from now on; nullptr: nothing.
// `is_ours` tells a link of ours from others' of the same kind.
void set_debug_info_beneath(c10::DebugInfoKind kind, std::shared_ptr<c10::DebugInfoBase> info,
                            bool (*is_ours)(const c10::DebugInfoBase&));

}  // namespace vmm
