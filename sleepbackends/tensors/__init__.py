"""Tensors that exist already: which belong together, and moving them without a trace."""
