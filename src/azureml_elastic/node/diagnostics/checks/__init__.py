"""Checks, one module per subject; each function returns or yields findings."""
