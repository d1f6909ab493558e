"""Typed events of a run, and the pure functions that turn them into a timeline."""
