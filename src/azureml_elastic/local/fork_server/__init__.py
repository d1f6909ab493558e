"""Fork server: a process that has imported modules once, and whose forks become nodes of a local cluster."""
