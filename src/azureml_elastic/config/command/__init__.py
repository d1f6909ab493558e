"""The command of a job, parsed as far as the agent needs it."""
