"""Snapshots of the state in memory, their replicas on other nodes, and recovery from them."""
