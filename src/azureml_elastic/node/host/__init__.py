"""The identity and the addresses of this node."""
