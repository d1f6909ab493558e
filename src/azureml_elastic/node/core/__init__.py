"""What a node decides, without clock, socket, thread, file or environment: time and what was seen are arguments."""
