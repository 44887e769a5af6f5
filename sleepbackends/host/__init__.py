"""The embedded default: memory of this process, saved to an unnamed file on local storage."""
