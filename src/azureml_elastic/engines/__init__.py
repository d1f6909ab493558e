"""Engines: a round runs the cluster of a framework such as Dask, and one program that uses it."""
