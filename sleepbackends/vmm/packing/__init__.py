"""Lossless packing: weights take fewer bytes on the way to the host, and there."""
