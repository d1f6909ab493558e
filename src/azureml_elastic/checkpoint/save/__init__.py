"""Saving the state of a run: when, from which buffers, and how a checkpoint is committed."""
