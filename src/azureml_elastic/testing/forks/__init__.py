"""Nodes of the local workspace that are forked from one process, although shell commands start them."""
