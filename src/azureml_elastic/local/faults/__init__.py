"""Faults that are injected into a local cluster: nodes, the table and the metadata service."""
