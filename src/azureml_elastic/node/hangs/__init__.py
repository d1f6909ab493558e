"""Hang detection: limits, the detector, stack dumps and the response."""
