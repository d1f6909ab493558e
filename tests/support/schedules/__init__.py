"""Random schedules of faults, carried out by the pure machines of a node: a simulator, and what must hold in it."""
