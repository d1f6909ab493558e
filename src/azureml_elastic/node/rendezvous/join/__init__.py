"""How a node joins: waiting for a round, and entering a sealed one."""
