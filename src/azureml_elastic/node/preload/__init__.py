"""Workers that start from a process which has already imported what they need; see ``docs/warm-workers.md``."""
