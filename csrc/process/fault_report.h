// Where the CPU touches an address of a pool that has no memory (SIGSEGV), debug mode says
// on stderr whose address it was, and then whoever would have had the signal has it:
// Python's faulthandler, or the system, which ends the process.
#pragma once

namespace vmm {

// For the whole process, once; whoever has the signal now comes after us.
void install_fault_report();

}  // namespace vmm
