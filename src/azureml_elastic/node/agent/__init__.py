"""The agent of one node: its workers, its connection to them, and its messages to other agents."""
