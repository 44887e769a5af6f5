"""The context of a device, current in a thread for a while."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sleepbackends.cumem.driver import CudaDriver

logger = logging.getLogger(__name__)


class Current:
    """A context made current. Entered for every copy, where a generator would cost the most.

    Parameters
    ----------
    driver : CudaDriver
        Makes it current.
    context : CUcontext
        Which.
    """

    __slots__ = ("_before", "_context", "_driver")

    def __init__(self, driver: CudaDriver, context: Any) -> None:
        self._driver = driver
        self._context = context
        self._before: Any = None

    def __enter__(self) -> None:
        call, cu = self._driver.call, self._driver._cu
        before = call(cu.cuCtxGetCurrent)
        if int(before) != int(self._context):
            call(cu.cuCtxSetCurrent, self._context)
            self._before = before

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        # What was done here is done: an error would say that it was not.
        (code,) = self._driver._cu.cuCtxSetCurrent(self._before)
        if code:
            logger.error("the context of this thread was not put back: %s", code.name)
