"""Checkpoints as files: their layout, their manifest, where they are kept. Knows neither torch nor the run."""
