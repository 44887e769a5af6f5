"""The documentation: complete, true, and free of what is not there."""
