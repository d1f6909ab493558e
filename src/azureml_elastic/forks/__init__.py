"""Processes that import modules once and are forked: into workers, stores of rounds and nodes of this machine."""
