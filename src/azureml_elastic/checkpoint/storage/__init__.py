"""Where checkpoints are kept: a local folder, a mount or an object store."""
