"""Memory of this process that is given back by page and taken again at the same address."""
