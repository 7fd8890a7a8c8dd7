"""What only two GPUs of one machine have: copies and kernels between them, NCCL."""
