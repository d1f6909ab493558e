"""Replacement of lost nodes, and cancellation of surplus node jobs."""
