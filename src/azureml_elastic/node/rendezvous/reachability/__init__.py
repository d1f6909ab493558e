"""Which nodes of a run cannot reach each other."""
