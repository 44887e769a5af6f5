"""Interfaces that engines speak already, on top of the backends here."""
