"""For people with an Intel GPU: ``python -m sleepbackends.xpu.selfcheck``.

Runs the contract suite, a cycle of 1 GiB and a small benchmark on the device, and prints one
block to paste into an issue; see ``sleepbackends.testing.selfcheck``, which this starts. Needs
the extra ``testing``.
"""

from __future__ import annotations

import subprocess
import sys

from sleepbackends.interpreter import python_command


def main() -> int:
    """Run the check with the arguments of this process; returns 0 if everything is well."""
    command = python_command("sleepbackends.testing.selfcheck", "xpu", *sys.argv[1:])
    return subprocess.run(command, check=False).returncode  # noqa: S603 - a module of ours


if __name__ == "__main__":
    sys.exit(main())
