"""Elastic data loading: each sample once per epoch at any world size."""
