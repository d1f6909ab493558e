"""The hub of a round on rank 0's node, and the connections of other nodes to it."""
