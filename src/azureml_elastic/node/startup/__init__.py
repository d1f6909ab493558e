"""How a node is put together from its parts at its start."""
