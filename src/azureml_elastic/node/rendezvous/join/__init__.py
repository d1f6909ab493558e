"""How a node joins a round: waiting for its seal, waiting as a spare, and entering it."""
