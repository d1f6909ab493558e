"""The identity, the addresses, the ports and the memory of this node."""
