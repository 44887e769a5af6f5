"""The xpu backend: virtual memory of Intel GPUs through Level Zero."""
