"""A sleep-mode backend that keeps sleeping memory compressed with Zstandard."""
