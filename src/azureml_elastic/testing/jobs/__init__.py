"""The jobs of the local workspace: machines, execution, evictions and results."""
