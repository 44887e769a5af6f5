"""What backends over virtual memory share, over the simulated CUDA driver."""
