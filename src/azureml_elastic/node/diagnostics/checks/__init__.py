"""Checks by subject; each function returns or yields findings."""
