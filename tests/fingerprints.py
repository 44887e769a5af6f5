"""The content fingerprint as it is written down, in NumPy: shares nothing with what is tested."""

from __future__ import annotations

import numpy as np


def reference(data: bytes) -> int:
    """Compute the fingerprint of bytes."""
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype="<u8")
    places = np.arange(len(words), dtype=np.uint64)
    u = words ^ (places * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03))
    u = u * np.uint64(0xBF58476D1CE4E5B9)
    u = u ^ (u >> np.uint64(32))
    u = u * np.uint64(0x94D049BB133111EB)
    products = (u & np.uint64(0xFFFFFFFF)) * (u >> np.uint64(32))
    s1, s2 = (int(each.sum(dtype=np.uint64)) for each in (u, products))
    return s2 << 64 | (s1 + len(data) * 0xD6E8FEB86659FD93) % 2**64
