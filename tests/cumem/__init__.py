"""The cumem backend over the simulated CUDA driver."""
