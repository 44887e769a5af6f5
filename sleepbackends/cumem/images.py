"""Compiled kernels, kept on disk: compiling takes a tenth of a second and a large library.

A file holds a SHA-256 of the image and then the image, so that a damaged one is noticed. Its
name says what it was made from: the kernel, the architecture, a hash of the source with its headers
and options, and the version of NVRTC. An image that any other NVRTC made does where none is
installed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from platformdirs import user_cache_path

from sleepbackends.cumem import nvrtc
from sleepbackends.cumem.nvrtc import KernelSource
from sleepbackends.errors import BackendUnavailableError

logger = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size


class Images:
    """The images of one kernel, for whatever device there is.

    Parameters
    ----------
    source : KernelSource
        What they are compiled from.
    directory : Path, optional
        Where they are kept; by default in the user's cache.
    """

    def __init__(self, source: KernelSource, directory: Path | None = None) -> None:
        self._source = source
        self._directory = directory or user_cache_path("sleepbackends") / "kernels"

    def cached(self, architecture: int) -> bytes | None:
        """Return the image that is kept for an architecture, if there is a good one."""
        try:
            paths = [self.path(architecture, nvrtc.version())]
        except BackendUnavailableError:
            paths = sorted(self._directory.glob(f"{self._stem(architecture)}*.image"))
        return next((image for image in map(_read, paths) if image is not None), None)

    def compiled(self, architecture: int) -> bytes:
        """Compile the image for an architecture and keep it, where that is possible.

        Raises
        ------
        BackendUnavailableError
            If NVRTC cannot be loaded.
        MechanismError
            If it fails.
        """
        image = nvrtc.compile_for(self._source, architecture)
        self.keep(image, architecture, nvrtc.version())
        return image

    def keep(self, image: bytes, architecture: int, version: str) -> None:
        """Put an image on disk, all of it or nothing; only a log says if that failed.

        Parameters
        ----------
        image : bytes
            What the driver loads.
        architecture : int
            What it is for.
        version : str
            Which NVRTC made it.
        """
        path = self.path(architecture, version)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, hashlib.sha256(image).digest() + image)
        except OSError as error:
            logger.debug("the kernel %s is not kept: %s", path, error)

    def path(self, architecture: int, version: str) -> Path:
        """Return where the image of an architecture is kept that an NVRTC makes."""
        return self._directory / f"{self._stem(architecture)}{version}.image"

    def _stem(self, architecture: int) -> str:
        digest = hashlib.sha256()
        name, text, headers, options = self._source
        digest.update(repr((text, headers, options)).encode())
        return f"{name}-sm_{architecture}-{digest.hexdigest()[:16]}-nvrtc"


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError as error:
        logger.debug("no kernel is kept in %s: %s", path, error)
        return None
    image = data[_DIGEST_BYTES:]
    if image and hashlib.sha256(image).digest() == data[:_DIGEST_BYTES]:
        return image
    logger.debug("the kernel in %s is damaged", path)
    return None


def _write(path: Path, data: bytes) -> None:
    # Another process may read or write the same: each its own file, and the last rename wins.
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
