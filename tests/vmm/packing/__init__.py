"""Packing on the host, and the rules that all who pack have to keep."""
