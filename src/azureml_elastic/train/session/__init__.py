"""The session of a training process, and what belongs to its lifetime."""
