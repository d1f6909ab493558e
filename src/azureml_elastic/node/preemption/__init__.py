"""Preemption notices: scheduled events, marker files and signals."""
