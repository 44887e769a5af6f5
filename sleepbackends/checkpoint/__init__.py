"""The checkpoint backend: everything a process holds on the GPU, through the CUDA driver."""
