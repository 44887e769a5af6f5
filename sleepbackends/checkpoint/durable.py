"""Save a sleeping process to a directory with CRIU, and restore it from there; experimental.

The driver keeps what was on the devices in the memory of the process, so an image of the process
holds it all. CRIU runs as a process of nobody: the one that is saved waits for a file to appear,
and finds it both after the save and after a restore.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sleepbackends.availability import Availability
from sleepbackends.checkpoint.targets import DEVICES, Target
from sleepbackends.errors import (
    PolicyConflictError,
    StorageError,
    UnsupportedOperationError,
)
from sleepbackends.interpreter import python_command

FIRST_VERSION = (4, 0)
"""Of CRIU: older ones fail on current kernels, and know nothing of the driver's processes."""

TIMEOUT_S = 600.0

_CHECK_TIMEOUT_S = 20.0
_POLL_S = 0.02
_SAID_BYTES = 2000
_IMAGES, _META, _SAVED, _RESTORED = "images", "process.json", "saved.json", "restored.json"


@dataclass(frozen=True)
class Saved:
    """What a save says when it returns, in the process that was saved or in a restored one.

    Parameters
    ----------
    directory : Path
        Where the image is.
    restored : bool
        Whether this is the process that was made of it.
    seconds : float
        How long the image took to write.
    """

    directory: Path
    restored: bool
    seconds: float


def probe() -> Availability:
    """Tell whether CRIU is there, new enough, and passes its own check; never raises."""
    criu = shutil.which("criu")
    if criu is None:
        return Availability(False, "CRIU is not installed", "install criu 4.0 or newer")
    try:
        said = _run([criu, "--version"], _CHECK_TIMEOUT_S)
        found = re.search(r"Version: (\d+)\.(\d+)", said.stdout)
        if found is None or (int(found[1]), int(found[2])) < FIRST_VERSION:
            version = f"{found[1]}.{found[2]}" if found else "of an unknown version"
            return Availability(
                False, f"CRIU {version} is too old for this", "install criu 4.0 or newer"
            )
        checked = _run([criu, "check"], _CHECK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Availability(False, f"CRIU cannot be run: {error}", f"see what {criu} check says")
    if checked.returncode:
        lines = [line for line in (checked.stdout + checked.stderr).splitlines() if line.strip()]
        return Availability(
            False,
            f"CRIU fails its own check: {lines[-1] if lines else 'without a word'}",
            "see what 'criu check' says; it needs root or CAP_CHECKPOINT_RESTORE",
        )
    return Availability(True, f"CRIU {found[1]}.{found[2]} passes its own check")


def check_savable(durability: Availability, *, asleep: bool) -> None:
    """Check that there is something to save, and a way to do it.

    Raises
    ------
    UnsupportedOperationError
        If there is no way.
    PolicyConflictError
        If the process is awake.
    """
    if not durability:
        raise UnsupportedOperationError(
            f"nothing can be saved to a directory: {durability.reason}",
            hint=durability.hint,
            operation="save",
        )
    if not asleep:
        raise PolicyConflictError(
            "the process is awake: what it holds on devices would not be saved",
            hint="suspend it first",
        )


def save(directory: Path, targets: Sequence[Target], devices: Sequence[str]) -> Saved:
    """Save this process, and return in it as well as in whatever is restored from the directory.

    Parameters
    ----------
    directory : Path
        Made if it is missing; must be empty.
    targets : sequence of Target
        Which processes sleep: this one alone.
    devices : sequence of str
        The devices that it needs again.

    Raises
    ------
    UnsupportedOperationError
        If other processes sleep as well, or devices are still open.
    StorageError
        If it could not be saved; the process is as before.
    """
    pid = os.getpid()
    if [target.pid for target in targets] != [pid]:
        raise UnsupportedOperationError(
            "only a process that sleeps alone can be saved",
            hint="save each in a backend of its own",
            operation="save",
        )
    if held := _open_devices(pid):
        raise UnsupportedOperationError(
            f"the process still has {', '.join(held)} open, which cannot be saved",
            hint="close them: NVIDIA's management library opens them too",
            operation="save",
        )
    _prepare(directory)
    meta = {"pid": pid, "devices": list(devices), "cuda": bool(devices)}
    (directory / _META).write_text(json.dumps(meta))
    return save_process(pid, directory)


def save_process(pid: int, directory: Path) -> Saved:
    """Have an unrelated process save this one, or another, and wait for it.

    Raises
    ------
    StorageError
        If it could not be saved; the process is as before.
    """
    _prepare(directory)
    with (directory / "saver.log").open("wb") as log:
        # A child's child, given up by its parent, so that it is not saved as well.
        done = subprocess.run(  # noqa: S603 - runs this module
            python_command(__name__, str(pid), os.fspath(directory)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
        )
    give_up = time.monotonic() + TIMEOUT_S
    saved = directory / _SAVED
    while not saved.exists():
        if done.returncode or time.monotonic() > give_up:
            raise StorageError(
                f"the process that was to save process {pid} failed",
                hint=f"see {directory / 'saver.log'}",
            )
        time.sleep(_POLL_S)
    found = json.loads(saved.read_text())
    if not found["ok"]:
        raise StorageError(
            f"CRIU could not save process {pid}: {found['said']}",
            hint=f"see {directory / _IMAGES / 'dump.log'}",
        )
    return Saved(directory, (directory / _RESTORED).exists(), found["seconds"])


def restore(directory: Path) -> int:
    """Make a process of what was saved; returns its number, which is the one it had.

    A process that held devices is asleep, and has to be resumed.

    Raises
    ------
    UnsupportedOperationError
        If CRIU cannot be used here.
    StorageError
        If nothing was saved there, or it could not be restored.
    """
    available = probe()
    if not available:
        raise UnsupportedOperationError(
            f"nothing can be restored: {available.reason}", hint=available.hint
        )
    pid: int = read_meta(directory)["pid"]
    if Path(f"/proc/{pid}").exists():
        raise StorageError(
            f"process {pid}, or another of that number, is still there",
            hint="end it first: a restored process has the number it had",
        )
    (directory / _RESTORED).write_text(json.dumps({"at": time.time()}))
    log = directory / _IMAGES / "restore.log"
    done = _criu(
        ["restore", "-D", os.fspath(directory / _IMAGES), "-o", log.name, "-d", "--shell-job"]
    )
    if done.returncode:
        (directory / _RESTORED).unlink()
        raise StorageError(
            f"CRIU could not restore process {pid}: {_last_line(log)}", hint=f"see {log}"
        )
    return pid


def read_meta(directory: Path) -> dict[str, Any]:
    """Read what was saved in a directory.

    Raises
    ------
    StorageError
        If nothing was.
    """
    try:
        found = json.loads((directory / _META).read_text())
        saved = json.loads((directory / _SAVED).read_text())
    except (OSError, ValueError) as error:
        raise StorageError(
            f"nothing was saved in {os.fspath(directory)!r}: {error}",
            hint="name the directory that was given to save_to()",
        ) from error
    if not saved.get("ok"):
        raise StorageError(f"the save in {os.fspath(directory)!r} failed: {saved.get('said')}")
    return dict(found)


def main() -> None:
    """Save the process that is named on the command line, as a process of nobody."""
    if os.fork():
        return
    os.setsid()
    pid, directory = sys.argv[1], Path(sys.argv[2])
    started = time.monotonic()
    log = directory / _IMAGES / "dump.log"
    command = ["dump", "-t", pid, "-D", os.fspath(log.parent), "-o", log.name]
    done = _criu([*command, "--shell-job", "--leave-running"])
    result = {
        "ok": done.returncode == 0,
        "said": "" if done.returncode == 0 else _last_line(log) or done.stderr[-_SAID_BYTES:],
        "seconds": time.monotonic() - started,
    }
    scratch = directory / "saved.new"
    scratch.write_text(json.dumps(result))
    scratch.replace(directory / _SAVED)


def _prepare(directory: Path) -> None:
    try:
        (directory / _IMAGES).mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / _SAVED).unlink(missing_ok=True)
        (directory / _RESTORED).unlink(missing_ok=True)
        if not (directory / _META).exists():
            meta = {"pid": os.getpid(), "devices": [], "cuda": False}
            (directory / _META).write_text(json.dumps(meta))
    except OSError as error:
        raise StorageError(
            f"{os.fspath(directory)!r} cannot be used: {error.strerror}",
            hint="name a directory on a disk that this user may write to",
        ) from error


def _open_devices(pid: int) -> list[str]:
    held = set()
    folder = Path(f"/proc/{pid}/fd")
    for name in os.listdir(folder):
        try:
            held.add(os.readlink(folder / name))
        except OSError:
            continue  # the one of the listing itself
    return sorted(name for name in held if name.startswith(DEVICES))


def _criu(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return _run([shutil.which("criu") or "criu", *arguments], TIMEOUT_S)


def _run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - a fixed program with our arguments
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _last_line(path: Path) -> str:
    try:
        lines = [line for line in path.read_text(errors="replace").splitlines() if "Error" in line]
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


if __name__ == "__main__":
    main()
