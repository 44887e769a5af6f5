"""The cumem backend: CUDA virtual memory, suspended and resumed at link speed."""
