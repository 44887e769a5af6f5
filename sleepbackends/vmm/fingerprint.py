"""The content fingerprint: 128 bits by which a suspend knows that bytes are as they were saved.

The function, over 64-bit words ``w[j]`` in little-endian order, the last one padded with
zeros; all arithmetic is modulo 2**64::

    u = (w[j] ^ (j * PLACE + START)) * MIX_1
    u = u ^ (u >> 32)
    u = u * MIX_2
    s1 = the sum of all u
    s2 = the sum of all (u & 0xffffffff) * (u >> 32)
    fingerprint = s2 << 64 | (s1 + size_bytes * SIZE) % 2**64

What it promises:

- A change within one word is always seen, and so is another size of the same words. The
  multipliers are odd and ``u ^ (u >> 32)`` can be undone, so that each term of ``s1`` is a
  bijection of its word.
- The place of a word counts: swapped, moved, added or removed words change the terms.
- Changes in several words are missed about once in 2**64, if they know nothing of the
  constants. In a model with words of 24 bits, pairs of words that were swapped, negated, added to
  or had the same bit flipped went unseen 0 to 1.4 times in 2**24. Mostly ``s2`` sees them: two
  flipped top bits leave ``s1`` alone half of the time.
- Sums commute, so any number of threads can share the work, in any order.
- It is no protection against somebody who wants two contents to look alike.

The C header ``_native/fingerprint.h`` is what the host library and the CUDA kernel are built
from; the constants here are the same numbers, for ``finish`` and for the torch expression.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sleepbackends.vmm.address_space import library_path

PLACE = 0x9E3779B97F4A7C15
START = 0xD1B54A32D192ED03
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
SIZE = 0xD6E8FEB86659FD93

WORD_MASK = 2**64 - 1


class Span(NamedTuple):
    """Consecutive memory of a device that is hashed as one.

    Parameters
    ----------
    address : int
        Of the first byte; any. All of the span has to be mapped until the fingerprint is there.
    size_bytes : int
        How many bytes there are.
    """

    address: int
    size_bytes: int

    def holds(self, address: int) -> bool:
        """Tell whether an address lies in it."""
        return self.address <= address < self.address + self.size_bytes


class Pending(Protocol):
    """Fingerprints that a device is computing."""

    def result(self) -> list[int]:
        """Wait for the fingerprints, letting other threads run, and return one for each span.

        Raises
        ------
        MechanismError
            If they could not be computed: nothing is known of the contents. The memory is as
            it was.
        """
        ...


def finish(s1: int, s2: int, size_bytes: int) -> int:
    """Return the fingerprint that the two sums over so many bytes make."""
    return (s2 & WORD_MASK) << 64 | (s1 + size_bytes * SIZE) & WORD_MASK


def host_fingerprint(address: int, size_bytes: int) -> int:
    """Compute the fingerprint of host memory, letting other threads run.

    Parameters
    ----------
    address : int
        Of the first byte; any.
    size_bytes : int
        How many bytes there are.

    Raises
    ------
    BackendUnavailableError
        If the package was installed without its native libraries.
    """
    halves = (ctypes.c_uint64 * 2)()
    _library(library_path("host")).sb_fingerprint(address, size_bytes, halves)
    return int(halves[1]) << 64 | int(halves[0])


@cache
def _library(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    library.sb_fingerprint.restype = None
    library.sb_fingerprint.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return library
