"""Backends that break one promise each, to see that the contract suite names it."""
