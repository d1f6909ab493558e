"""Each node's hub, which serves heartbeats and round changes, and the connections of other nodes to it."""
