"""A cluster on one machine that runs the production node code, with faults injected."""
