"""The benchmark of suspend and resume on a GPU, next to peers and to plain copies."""
