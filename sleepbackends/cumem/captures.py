"""Calls beside an engine that may be capturing a graph.

While a thread captures in CUDA's default mode, every other thread is forbidden calls that might
wait or allocate: they are refused, and the capture is lost ("cudaStreamCaptureModeGlobal" in the
runtime's documentation of ``cudaThreadExchangeStreamCaptureMode``; seen by others in
https://github.com/vllm-project/vllm/issues/46933). A thread that has nothing to do with what is
captured may ask to be let alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sleepbackends.errors import SleepBackendsError

if TYPE_CHECKING:
    from sleepbackends.cumem.driver import CudaDriver

logger = logging.getLogger(__name__)


class Aside:
    """A scope in which this thread's calls do not end what others capture.

    Parameters
    ----------
    driver : CudaDriver
        Makes the calls.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._before: Any = None

    def __enter__(self) -> None:
        relaxed = self._driver._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._before = self._exchange(relaxed)

    def __exit__(self, *_: object) -> None:
        try:
            self._exchange(self._before)
        except SleepBackendsError:
            # What was done here is done: an error would say that it was not.
            logger.exception("the capture mode of this thread was not put back")

    def _exchange(self, mode: Any) -> Any:
        return self._driver.call(self._driver._cu.cuThreadExchangeStreamCaptureMode, mode)
