"""Work that runs the same under torch_vmm and under torch's own allocator: functions of plain arguments and results."""
