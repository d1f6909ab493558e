"""Restoring the state of a run from a committed checkpoint."""
