"""Checks of a machine, run before a node joins and by the commands ``health`` and ``doctor``."""
