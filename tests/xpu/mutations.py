"""Deliberate mistakes in the driver's files, to see that the suite finds each."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import NamedTuple

import sleepbackends
from tests.native.build import SOURCES

PACKAGE = Path(sleepbackends.__file__).parent
VARIABLE = "SLEEPBACKENDS_TEST_MUTATION"

NATIVE = "_native/driver_level_zero.c"
DRIVER, LANES = "xpu/driver.py", "xpu/lanes.py"


class Mutation(NamedTuple):
    """A mistake.

    Parameters
    ----------
    file : str
        Where, in the package.
    before, after : str
        The text, which occurs once, and what takes its place.
    """

    file: str
    before: str
    after: str

    def apply(self) -> str:
        """Return the text of the file with the mistake in it."""
        text = (PACKAGE / self.file).read_text()
        assert text.count(self.before) == 1, f"{self.before!r} is not there once"
        return text.replace(self.before, self.after)


MUTATIONS = {
    "half the physical memory": Mutation(
        NATIVE, "{PHYSICAL_MEM_DESC, NULL, 0, size}", "{PHYSICAL_MEM_DESC, NULL, 0, size / 2}"
    ),
    "another type of descriptor": Mutation(
        NATIVE, "PHYSICAL_MEM_DESC = 0x20", "PHYSICAL_MEM_DESC = 0x1d"
    ),
    "mapped without access": Mutation(NATIVE, "READ_WRITE = 1", "READ_WRITE = 0"),
    "one page size for all sizes": Mutation(
        NATIVE,
        "if (size % page == 0) return size;",
        "page = granules[device];\n    if (size % page == 0) return size;",
    ),
    "a leaked handle": Mutation(
        NATIVE,
        "Result r = ze.destroy(devices[device].context, pointer(handle));",
        "Result r = 0;\n  (void)handle;",
    ),
    "leaked addresses": Mutation(
        NATIVE,
        "Result r = ze.release_range(devices[device].context, pointer(address), size);",
        "Result r = 0;\n  (void)address;",
    ),
    "an unmap that is not made": Mutation(
        NATIVE,
        "return ze.unmap(devices[device].context, pointer(address), size);",
        "(void)device, (void)address, (void)size;\n  return 0;",
    ),
    "a free that does not wait": Mutation(NATIVE, "if (devices[device].wait)", "if (0)"),
    "books that only grow": Mutation(NATIVE, "if (!r) committed[device] -= size;", ""),
    "what the device says believed": Mutation(
        NATIVE, "if (d->n_modules && said < *available)", "if (d->n_modules)"
    ),
    "unmapped before kernels are done": Mutation(
        DRIVER, "XPU.of(self._torch).synchronize(device)", "pass"
    ),
    "lanes not waited for": Mutation(DRIVER, "            lane.wait()\n", "            pass\n"),
    "everything takes itself for pinned": Mutation(
        DRIVER, "return self._pinning.covers(host, size_bytes)", "return True"
    ),
    "an event that is not waited for": Mutation(
        LANES,
        'self._ze.call("zeEventHostSynchronize", self._handle, FOR_EVER, what=self._doing)',
        "pass",
    ),
    "commands that may overlap": Mutation(
        LANES,
        'self._ze.call("zeCommandListAppendBarrier", command_list, None, 0, None)',
        "pass",
    ),
    "an event used again too early": Mutation(
        LANES, 'if self._ze.code("zeEventQueryStatus", event) == SUCCESS:', "if True:"
    ),
    "events that are always done": Mutation(LANES, "return code == SUCCESS", "return True"),
    "the wrong byte": Mutation(
        LANES, "ctypes.addressof(_PATTERNS) + byte", "ctypes.addressof(_PATTERNS)"
    ),
}
"""By what is wrong then."""


def chosen() -> Mutation | None:
    """Return the mistake that the environment asks for."""
    name = os.environ.get(VARIABLE)
    return None if name is None else MUTATIONS[name]


def native_sources(mutation: Mutation | None, folder: Path) -> list[Path]:
    """Return the sources of the native library, one of them mutated if that is asked for."""
    sources = list(SOURCES["level_zero"])
    if mutation is None or mutation.file != NATIVE:
        return sources
    mutated = folder / "driver_level_zero.c"
    mutated.write_text(mutation.apply())
    return [mutated if source.name == mutated.name else source for source in sources]


def install() -> None:
    """Import the mutated module in the place of the real one, if the environment asks for it."""
    mutation = chosen()
    if mutation is None or mutation.file == NATIVE:
        return
    name = "sleepbackends." + mutation.file.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, PACKAGE / mutation.file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(mutation.apply(), str(PACKAGE / mutation.file), "exec"), vars(module))  # noqa: S102 - our own code with a mistake in it
