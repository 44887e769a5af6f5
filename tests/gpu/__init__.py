"""Tests that need a CUDA GPU: ``python -m pytest tests/gpu``."""
