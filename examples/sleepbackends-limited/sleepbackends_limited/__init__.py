"""A sleep-mode backend that wraps any other, limits it, and counts what it does."""
