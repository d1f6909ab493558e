"""Checkpoints: format and storage, saving and loading, and the snapshots in memory that make them rarely needed."""
