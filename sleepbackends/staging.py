"""Copying ahead while an engine serves, where its backend can."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import cast

from sleepbackends.errors import SleepBackendsError, UnsupportedOperationError
from sleepbackends.protocol import SleepModeBackend, Staging, StagingBackend
from sleepbackends.reports import Staged

logger = logging.getLogger(__name__)


class Stager:
    """Has a backend stage.

    Parameters
    ----------
    backend : SleepModeBackend
        Which may be able to or not.
    automatic : bool
        Whether ``when_filled`` does anything.
    limit_gib_s : float
        The most to copy in a second.
    """

    def __init__(self, backend: SleepModeBackend, automatic: bool, limit_gib_s: float) -> None:
        self._backend = backend
        self._automatic = automatic
        self._limit_gib_s = limit_gib_s

    def stage(self, tags: Collection[str] | None, *, background: bool) -> Staging:
        """Stage now.

        Raises
        ------
        UnsupportedOperationError
            If the backend cannot.
        UnknownTagError
            If there is no such tag.
        """
        backend = self._able
        if backend is None:
            raise UnsupportedOperationError(
                f"backend {self._backend.name!r} cannot copy ahead: supports_staging is False",
                hint="sleep without: everything is copied then",
                operation="stage",
            )
        return backend.stage(tags, background=background, limit_gib_s=self._limit_gib_s)

    def staged(self) -> Staged | None:
        """Tell what is saved of memory that is in use; None if the backend cannot stage."""
        return None if self._able is None else self._able.staged()

    def when_filled(self) -> None:
        """Stage in the background if that is to be automatic; a failure is logged."""
        if not self._automatic or self._able is None:
            return
        try:
            self.stage(None, background=True)
        except SleepBackendsError:
            logger.warning("nothing is staged; the next sleep copies more", exc_info=True)

    @property
    def _able(self) -> StagingBackend | None:
        able = self._backend.capabilities.supports_staging
        return cast("StagingBackend", self._backend) if able else None
