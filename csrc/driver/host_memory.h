// How much memory this process may use of the machine's. It reads what the
// operating system says and keeps nothing.
#pragma once

#include <cstddef>
#include <string>

namespace vmm {

// Bytes: the machine's memory, or what the tightest control group over this
// process allows where that is less (a container's limit: beyond it the kernel
// kills the process, and the machine's size says nothing of it). `root` stands
// before every file that is asked, for tests; the machine's own memory is
// asked of the kernel directly.
std::size_t usable_memory(const std::string& root = "");

// Bytes that may be taken before the machine begins to swap, or a control group over this
// process is full. kUnlimited where the kernel does not say.
std::size_t available_memory(const std::string& root = "");

// Stretches of addresses that a process may have mapped, each with rights and a file of
// its own (vm.max_map_count); kUnlimited where the kernel does not say. At the limit
// every call that maps fails, in the whole process, and some that unmap.
std::size_t most_mappings(const std::string& root = "");

// Bytes that the tightest control group over this process allows; kUnlimited
// where none does. Version 2 (memory.max) and version 1
// (memory.limit_in_bytes), each from the process' group up to the root.
std::size_t control_group_limit(const std::string& root = "");
// What these groups leave of that now; what the kernel takes back by itself (the files that it
// keeps in memory) counts as left.
std::size_t control_group_room(const std::string& root = "");

}  // namespace vmm
