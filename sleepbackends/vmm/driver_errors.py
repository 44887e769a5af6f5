"""From the answer of a driver, or of the native library, to an error that says what to do next."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sleepbackends.errors import DeviceMemoryError, MechanismError, SleepBackendsError

NATIVE_CODES = {
    -1: "the driver's library cannot be loaded",
    -2: "the driver lacks a function that is needed; update it",
    -3: "out of host memory",
    -4: "the memory was freed meanwhile",
    -5: "the memory is not in the state this step needs",
    -6: "the native library was not told of the device",
}
"""What ``_native/address_space.c`` answers beside the driver's own codes."""


@dataclass(frozen=True)
class Answers:
    """What the answers of one driver mean; those that are not named say that nothing was done.

    Parameters
    ----------
    no_room : collection of str
        The device, or what the driver itself needs, has no room; another process may give
        some back.
    lost : collection of str
        The device is gone, with what was in its memory; later calls fail the same way.
    unable : collection of str
        This process, its driver or its device cannot do it, however often it is asked.
    lost_hint, unable_hint : str
        What to do then.
    prefix : str
        What the driver's names begin with, and those here do not.
    """

    no_room: Collection[str]
    lost: Collection[str]
    unable: Collection[str]
    lost_hint: str
    unable_hint: str
    prefix: str

    def error(
        self, name: str, what: str, *, needed_bytes: int = 0, available_bytes: int | None = None
    ) -> SleepBackendsError:
        """Make the error that an answer of the driver stands for.

        Parameters
        ----------
        name : str
            The answer, with or without the prefix.
        what : str
            What was being done.
        needed_bytes : int
            For errors about room: what the call asked for.
        available_bytes : int, optional
            For errors about room: what there was.
        """
        short = name.removeprefix(self.prefix)
        if short in self.no_room:
            available = "" if available_bytes is None else f", {available_bytes} available"
            return DeviceMemoryError(
                f"{what} failed: {needed_bytes} bytes of device memory needed{available}",
                needed_bytes=needed_bytes,
                available_bytes=available_bytes or 0,
                hint="let another process give memory back and repeat the call, or set "
                "wait_for_memory_s",
            )
        hints = {self.lost_hint: self.lost, self.unable_hint: self.unable}
        hint = next((hint for hint, names in hints.items() if short in names), "repeat the call")
        final = short in self.lost or short in self.unable
        return MechanismError(f"{what} failed: {name}", hint=hint, recoverable=not final)


def native_error(code: int, what: str) -> MechanismError:
    """Make the error that a negative code of the native library stands for."""
    why = NATIVE_CODES.get(code, f"code {code}")
    return MechanismError(f"{what} failed: {why}", hint="repeat the call")
