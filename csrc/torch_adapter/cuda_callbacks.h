// torch's registered ways of freeing GPU memory when there is none left.
#pragma once

namespace vmm {

// Runs every FreeMemoryCallback; true if one of them freed something. Does
// nothing unless torch allocates through us: another allocator would be asked
// to free while it holds its own lock.
bool run_cuda_free_memory_callbacks();

}  // namespace vmm
