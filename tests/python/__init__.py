"""What needs no GPU and has no counterpart on one: plain values, decorators, threads, processes."""
