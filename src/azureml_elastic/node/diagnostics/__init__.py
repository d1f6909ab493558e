"""Checks of a machine, with two front ends: before a node joins (``health``) and on request (``doctor``)."""
