"""What tests cost in CPU time, and the end of those that hang: a plugin for pytest."""
