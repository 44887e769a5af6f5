"""Compiles each kernel at most once in a process, whoever asks first."""

from __future__ import annotations

import threading

from sleepbackends.cumem.images import Images
from sleepbackends.cumem.nvrtc import KernelSource


class Compiler:
    """Has images of kernels: those that are kept on disk, or newly compiled ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._images: dict[tuple[KernelSource, int], bytes] = {}

    def image(self, source: KernelSource, architecture: int) -> bytes:
        """Return the image of a kernel for an architecture.

        Whoever asks for one that is being compiled waits for it.

        Raises
        ------
        BackendUnavailableError
            If it has to be compiled, and NVRTC cannot be loaded.
        MechanismError
            If compiling fails.
        """
        wanted = source, architecture
        found = self._images.get(wanted)
        if found is not None:
            return found
        with self._lock:
            if wanted not in self._images:
                kept = Images(source).cached(architecture)
                self._images[wanted] = kept or Images(source).compiled(architecture)
            return self._images[wanted]

    def other_than(self, image: bytes, source: KernelSource, architecture: int) -> bytes | None:
        """Return another image instead of one that was no good; None if compiling makes the same.

        Raises
        ------
        BackendUnavailableError, MechanismError
            As ``image``.
        """
        with self._lock:
            found = self._images[source, architecture] = Images(source).compiled(architecture)
        return None if found == image else found
