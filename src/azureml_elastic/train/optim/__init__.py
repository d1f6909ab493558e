"""Gradients and learning rates at a changing world size."""
