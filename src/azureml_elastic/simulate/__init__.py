"""Simulation of a run: its wall time and cost on nodes that come and go, by the decisions of the product itself."""
