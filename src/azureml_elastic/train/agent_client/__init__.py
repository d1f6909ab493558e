"""The training process's connection to the node's agent."""
