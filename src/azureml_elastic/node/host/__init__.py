"""What a node is to the others: its identity, and the addresses and ports at which they reach it."""
