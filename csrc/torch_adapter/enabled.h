// Could torch be making tensors through us? It can in four ways: as the
// allocator of a kind of device (enable(), change_current_allocator()), as the
// provider of a torch.cuda.MemPool, and by the plain C entry points. Only the
// first is known for certain.
#pragma once

#include "process/runtime.h"

namespace vmm {

// We are torch's allocator there.
bool is_enabled(DeviceKind kind);
// That, or torch has something of ours that it may call: the allocator object
// is held by more than this library, or the entry points have been asked for.
bool may_allocate(DeviceKind kind);
// Somebody asked for the library with the entry points, or called one.
void note_entry_points_used();

}  // namespace vmm
