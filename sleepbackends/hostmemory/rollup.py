"""What the kernel counts of this process, added up over all of its mappings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal


def rollup_bytes(what: Literal["Rss", "Anonymous"]) -> int:
    """Return how much of this process is in memory, all of it or what no file is behind.

    It is read from the page tables, and reading it takes no memory, unlike a list of the
    mappings.

    Raises
    ------
    OSError
        If the kernel does not tell, as in some sandboxes.
    """
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return 1024 * int(re.findall(rf"^{what}:\s+(\d+) kB$", text, flags=re.MULTILINE)[0])
