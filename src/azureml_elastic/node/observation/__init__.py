"""Reads of a run's table from outside of the run."""
